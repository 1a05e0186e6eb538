"""The measurements of the fast per-example clipping paper, as a command: `clipwise bench`.

Also runs as `python -m clipwise.bench`, which needs torch, numpy and scipy and nothing else.
"""
