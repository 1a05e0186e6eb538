"""Models and data that the command line knows."""
