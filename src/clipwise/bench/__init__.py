"""What private training costs, as a command: `clipwise bench`.

Also runs as `python -m clipwise.bench`, which needs torch, numpy and scipy and nothing else.
"""
