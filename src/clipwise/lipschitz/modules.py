"""Which rule bounds which module; what has none is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.layers.bounded_norm import BoundedGroupNorm, BoundedLayerNorm
from clipwise.layers.clip_input import ClipInput
from clipwise.layers.clipped.layer import HOOKS, has_code_of_its_own
from clipwise.layers.l2_attention import L2Mixture
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.lipschitz import activations, pooling
from clipwise.lipschitz.activations import ElementwiseRule, LearnedSlopeRule, SoftmaxRule
from clipwise.lipschitz.affine import ConvolutionRule, EmbeddingRule, LinearRule
from clipwise.lipschitz.normalizing import BoundedNormRule, ClipInputRule, MixtureRule
from clipwise.lipschitz.recurrent import RECURRENT, RecurrentRule
from clipwise.lipschitz.refusals import DOT_PRODUCTS, UNKNOWN, own_dimension, refusal, require_own_padding
from clipwise.lipschitz.rule import Rounding, Rule
from clipwise.lipschitz.shaping import DropoutRule, MoveRule

Shape = tuple[int, ...]
# name, module, one example's shapes before and after it, the arithmetic
Build = Callable[[str, Any, Sequence[Shape], Shape, Rounding], Rule]

_OURS = (ClipInput, BoundedGroupNorm, BoundedLayerNorm, L2Mixture)
# What people will try, and what they can do instead.
_REFUSED: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: DOT_PRODUCTS,
    nn.TransformerEncoderLayer: DOT_PRODUCTS,
    nn.TransformerDecoderLayer: DOT_PRODUCTS,
    nn.LayerNorm: "its slope grows as the deviation shrinks: take clipwise.layers.BoundedLayerNorm",
    nn.GroupNorm: "its slope grows as the deviation shrinks: take clipwise.layers.BoundedGroupNorm",
    nn.RMSNorm: "its slope grows as the input shrinks: take clipwise.layers.BoundedLayerNorm",
    PublicBatchNorm: "its slope grows as the deviation of the public rows shrinks: take "
    "clipwise.layers.BoundedGroupNorm",
    nn.LogSoftmax: "give the scores themselves to the loss",
    ReleasedStatisticsNorm: "its slope grows as the released deviation shrinks: take clipwise.layers.BoundedGroupNorm",
    nn.modules.batchnorm._BatchNorm: "it mixes examples: take clipwise.layers.BoundedGroupNorm",
    nn.modules.instancenorm._InstanceNorm: "its slope grows as the deviation shrinks: take "
    "clipwise.layers.BoundedGroupNorm with one group a channel",
}


def is_known(module: nn.Module) -> bool:
    """Whether a module is looked at as a whole, though it may have a Python `forward`."""
    return isinstance(module, (*_OURS, PublicBatchNorm, BatchStatisticsNorm))


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
    """Refuse a module that no rule is for, before anything is done with it."""
    if type(module) in _BUILDERS:
        return
    for refused, instead in _REFUSED.items():
        if isinstance(module, refused):
            raise refusal(name, module, instead)
    raise refusal(name, module, UNKNOWN)


def module_rule(
    name: str, module: nn.Module, shapes: Sequence[Shape], out: Shape, rounding: Rounding
) -> Rule:
    """The rule of a module, for one example's shapes."""
    require_rule(name, module)
    return _BUILDERS[type(module)](name, module, shapes, out, rounding)


def _elementwise(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    try:
        return ElementwiseRule(activations.constants_of(module), rounding)
    except ConfigurationError as error:
        raise refusal(name, module, str(error).rstrip(".")) from None


def _convolution(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    if module.padding_mode != "zeros":
        raise refusal(name, module, f"padding_mode={module.padding_mode!r} has no bound here: take 'zeros'")
    if len(shapes[0]) != len(module.kernel_size) + 1:
        raise refusal(
            name, module, "its input has no dimension for examples: give input_shape without the batch"
        )
    return ConvolutionRule(module, shapes[0], out, rounding)


def _pooling(make: Callable[[nn.Module, Shape, Shape, Rounding], Rule]) -> Build:
    return lambda name, module, shapes, out, rounding: make(module, shapes[0], out, rounding)


def _embedding(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    if module.max_norm is not None:
        raise refusal(
            name,
            module,
            "max_norm changes the rows that a batch uses, without noise: leave it out, rows are clipped",
        )
    if module.scale_grad_by_freq or module.sparse:
        raise refusal(name, module, "scale_grad_by_freq and sparse have no bound here: leave them out")
    return EmbeddingRule(module, out, rounding)


def _recurrent(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    if len(shapes) != 1:
        raise refusal(name, module, "a first state of its own has no bound here: leave it out, it is 0")
    if not module.batch_first or module.proj_size:
        raise refusal(name, module, "only batch_first=True without proj_size has a bound")
    if len(list(module.parameters())) < len(module._flat_weights):
        raise refusal(
            name, module, "weights that are tied within it have no bound here: give each its own tensor"
        )
    return RecurrentRule(module, shapes[0], rounding)


def _mixture(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    if shapes[0] != shapes[1] or len(out) != 2:
        raise refusal(name, module, "places and values must both have the shape (batch, positions, width)")
    return MixtureRule(module, out, rounding)


def _padding(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    require_own_padding(name, module.padding, shapes[0])
    return MoveRule(out)


def _softmax(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    if module.dim is None:
        raise refusal(name, module, "give dim")
    return SoftmaxRule(own_dimension(name, module.dim, len(out)), rounding)


def _group_norm(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    return BoundedNormRule(_floor(name, module), math.prod(out) // module.num_groups, out, rounding)


def _layer_norm(name: str, module: Any, shapes: Sequence[Shape], out: Shape, rounding: Rounding) -> Rule:
    return BoundedNormRule(_floor(name, module), math.prod(module.normalized_shape), out, rounding)


def _floor(name: str, module: Any) -> float:
    """alpha, which may have been set to anything since the module was made."""
    if not (math.isfinite(module.alpha) and module.alpha > 0):
        raise refusal(name, module, f"alpha={module.alpha} gives no bound: set a positive, finite number")
    return float(module.alpha)


_BUILDERS: dict[type[nn.Module], Build] = {
    kind: build
    for kinds, build in (
        (tuple(activations.MODULES), _elementwise),
        ((nn.Linear,), lambda name, module, shapes, out, rounding: LinearRule(module, rounding)),
        ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
        ((nn.Embedding,), _embedding),
        (pooling.MAX, _pooling(pooling.maximum_rule)),
        (pooling.AVERAGE, _pooling(pooling.average_rule)),
        (pooling.ADAPTIVE_MAX, _pooling(pooling.adaptive_maximum_rule)),
        (pooling.ADAPTIVE_AVERAGE, _pooling(pooling.adaptive_average_rule)),
        (RECURRENT, _recurrent),
        ((nn.Flatten, nn.Unflatten), lambda name, module, shapes, out, rounding: MoveRule(out)),
        ((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), _padding),
        (
            (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
            lambda name, module, shapes, out, rounding: DropoutRule(module, rounding),
        ),
        ((nn.PReLU,), lambda name, module, shapes, out, rounding: LearnedSlopeRule(module, rounding)),
        ((nn.Softmax,), _softmax),
        ((ClipInput,), lambda name, module, shapes, out, rounding: ClipInputRule(module, out, rounding)),
        ((L2Mixture,), _mixture),
        ((BoundedGroupNorm,), _group_norm),
        ((BoundedLayerNorm,), _layer_norm),
    )
    for kind in kinds
}
