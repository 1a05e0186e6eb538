"""Experiments on papers and on clipwise itself. Run one with `python -m experiments NAME`; none is in the wheel."""
