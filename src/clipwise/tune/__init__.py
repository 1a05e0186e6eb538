"""Search for settings: accuracy against epsilon, and what the search itself costs in privacy."""

from clipwise.tune.space import Choice, Range, Space, paper_space, point
from clipwise.tune.trial import METHODS, Trial

__all__ = ["METHODS", "Choice", "Range", "Space", "Trial", "paper_space", "point"]
