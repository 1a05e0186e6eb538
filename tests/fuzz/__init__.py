"""Random models of every layer that clipwise promises, against a forward pass per example."""
