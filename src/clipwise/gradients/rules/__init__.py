"""Rules, a file a kind of operation. Importing this package enters them all."""

from clipwise.gradients.rules import (  # noqa: F401 (imported to be registered)
    batched,
    broadcast,
    convolution,
    elementwise,
    embedding,
    linear,
    normalization,
)
from clipwise.gradients.rules.registry import Finish, Rule, RuleDoesNotApply, begin, register, registered

__all__ = ["Finish", "Rule", "RuleDoesNotApply", "begin", "register", "registered"]
