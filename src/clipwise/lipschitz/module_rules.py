"""Which rule bounds which module. What has none is refused by name."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_modules

from clipwise.errors import UnsupportedModelError
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.layers.bounded import BoundedGroupNorm, BoundedLayerNorm, ClipInput, L2Mixture
from clipwise.layers.clipped.layer import HOOKS, has_code_of_its_own
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.lipschitz import activations, pooling
from clipwise.lipschitz.bounded_layers import BoundedNormRule, ClipInputRule, MixtureRule
from clipwise.lipschitz.convolution import ConvolutionRule
from clipwise.lipschitz.linear import EmbeddingRule, LinearRule
from clipwise.lipschitz.recurrent import RECURRENT, RecurrentRule
from clipwise.lipschitz.rule import DOT_PRODUCTS, UNKNOWN, Build, Call, Rule, refusal
from clipwise.lipschitz.tensor_operations import MoveRule

_GROW = "its slope grows as the deviation shrinks: take clipwise.layers."
# What people will try, and what they can do instead.
_REFUSED: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: DOT_PRODUCTS,
    nn.TransformerEncoderLayer: DOT_PRODUCTS,
    nn.TransformerDecoderLayer: DOT_PRODUCTS,
    nn.LayerNorm: _GROW + "BoundedLayerNorm",
    nn.GroupNorm: _GROW + "BoundedGroupNorm",
    nn.RMSNorm: "its slope grows as the input shrinks: take clipwise.layers.BoundedLayerNorm",
    PublicBatchNorm: "its slope grows as the deviation of the public rows shrinks: take "
    "clipwise.layers.BoundedGroupNorm",
    nn.LogSoftmax: "give the scores themselves to the loss",
    ReleasedStatisticsNorm: "its slope grows as the released deviation shrinks: take clipwise.layers.BoundedGroupNorm",
    nn.modules.batchnorm._BatchNorm: "it mixes examples: take clipwise.layers.BoundedGroupNorm",
    nn.modules.instancenorm._InstanceNorm: _GROW + "BoundedGroupNorm with one group a channel",
}


def is_known(module: nn.Module) -> bool:
    """Whether a module is looked at as a whole, though it may have a Python `forward`."""
    ours = (ClipInput, BoundedGroupNorm, BoundedLayerNorm, L2Mixture, PublicBatchNorm, BatchStatisticsNorm)
    return isinstance(module, ours)


def require_no_hooks(name: str, module: nn.Module) -> None:
    """Refuse what could change a value or a gradient where no graph shows it."""
    if type(module).__name__ == "OptimizedModule":
        raise refusal(
            name, module, "no trace shows what a compiled model does: give the model without torch.compile"
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise refusal(name, module, "its shapes are not known yet: run the model once before make_private")
    if has_code_of_its_own(module):
        raise refusal(
            name, module, "it has hooks, or a forward of its own, which no bound knows: take them off"
        )


def require_no_global_hooks() -> None:
    """The same of hooks that torch calls for every module."""
    if any(getattr(torch_modules, f"_global{hooks}") for hooks in HOOKS):
        raise UnsupportedModelError(
            "Lipschitz bounds: torch has hooks on all modules (torch.nn.modules.module.register_module_...), which no "
            "bound knows: take them off."
        )


def require_rule(name: str, module: nn.Module) -> None:
    """Refuse a module that has no rule, before anything is done with it."""
    if type(module) not in _RULES:
        raise refusal(name, module, next((s for k, s in _REFUSED.items() if isinstance(module, k)), UNKNOWN))


def module_rule(call: Call) -> Rule:
    """The rule of a module, for one example's shapes."""
    require_rule(call.name, call.target)
    return _RULES[type(call.target)](call)


def _padding(call: Call) -> Rule:
    call.require_own_padding(call.target.padding)
    return MoveRule(call.out)


# To bound another module, write its rule in a file of this folder and name it here.
_RULES: dict[type[nn.Module], Build] = {
    kind: build
    for kinds, build in (
        (tuple(activations.MODULES), activations.activation_rule),
        ((nn.PReLU,), activations.LearnedSlopeRule),
        ((nn.Softmax,), activations.SoftmaxRule),
        ((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), activations.DropoutRule),
        ((nn.Linear,), LinearRule),
        ((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvolutionRule),
        ((nn.Embedding,), EmbeddingRule),
        (RECURRENT, RecurrentRule),
        (pooling.MAX, pooling.maximum_rule),
        (pooling.AVERAGE, pooling.average_rule),
        (pooling.ADAPTIVE_MAX, pooling.adaptive_maximum_rule),
        (pooling.ADAPTIVE_AVERAGE, pooling.adaptive_average_rule),
        ((nn.Flatten, nn.Unflatten), lambda call: MoveRule(call.out)),
        ((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), _padding),
        ((ClipInput,), ClipInputRule),
        ((L2Mixture,), MixtureRule),
        ((BoundedGroupNorm, BoundedLayerNorm), BoundedNormRule),
    )
    for kind in kinds
}
