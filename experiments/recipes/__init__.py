"""Experiments that choose and judge the defaults of `clipwise train`."""
