"""Random models of all supported layers, compared with one forward pass per example."""
