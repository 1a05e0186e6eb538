"""Rules, a file a kind of operation. Importing this package enters them all."""

from clipwise.gradients.rules import (  # noqa: F401 (imported to be registered)
    batched,
    bilinear,
    broadcast,
    convolution,
    elementwise,
    embedding,
    linear,
    normalization,
    recurrent,
)
from clipwise.gradients.rules.registry import (
    Finish,
    FinishAll,
    Rule,
    RuleDoesNotApply,
    begin,
    covers,
    register,
    register_for_all_outputs,
    registered,
)

__all__ = [
    "Finish",
    "FinishAll",
    "Rule",
    "RuleDoesNotApply",
    "begin",
    "covers",
    "register",
    "register_for_all_outputs",
    "registered",
]
