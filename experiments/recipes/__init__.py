"""Experiments that chose the defaults of `clipwise train`."""
