"""Hyper-parameter search for accuracy and epsilon, and the privacy cost of the search itself."""

from clipwise.tune.subject import Choice, Range, Recipe, Run, Score, Space, Subject, point

__all__ = ["Choice", "Range", "Recipe", "Run", "Score", "Space", "Subject", "point"]
