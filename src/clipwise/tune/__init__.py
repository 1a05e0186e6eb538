"""Hyper-parameter search for accuracy and epsilon, and the privacy cost of the search itself."""

from clipwise.tune.space import Choice, Range, Space, point
from clipwise.tune.subject import Recipe, Run, Score, Subject

__all__ = ["Choice", "Range", "Recipe", "Run", "Score", "Space", "Subject", "point"]
