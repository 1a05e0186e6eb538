"""Runs the experiments of the papers again, with the privacy cost of each: `python -m experiments`."""
