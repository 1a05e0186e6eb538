"""Experiments of the papers, run again with what each of them really costs in privacy.

`python -m experiments` is the command; `experiments/` holds what it wrote, and what differs from the papers.
"""
