"""Time and memory of private training: `python -m benchmarks`, which needs torch, numpy and scipy only."""
