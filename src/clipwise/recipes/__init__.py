"""Models and data for the command line."""
