"""clipwise: train PyTorch models under differential privacy."""
