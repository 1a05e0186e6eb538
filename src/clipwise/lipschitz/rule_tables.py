"""The tables of rules for modules, functions and tensor methods. Other operations are refused by name.

To bound another operation, write its rule in a module of this folder and add it to one of the tables below.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules

from clipwise.errors import UnsupportedModelError
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.layers.bounded import BoundedGroupNorm, BoundedLayerNorm, ClipInput
from clipwise.layers.clipped.layer import HOOKS, has_code_of_its_own
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.lipschitz import activations, convolution
from clipwise.lipschitz.activations import affine_rule, bounded_norm_rule, clip_input_rule
from clipwise.lipschitz.linear import EmbeddingRule, JoinRule, LinearRule, ProductRule, SumRule
from clipwise.lipschitz.rule import DOT_PRODUCTS, UNKNOWN, Build, Call, Rule, move_rule, pad_rule, refusal

_GROW = "its slope grows as the deviation shrinks: use clipwise.layers."
# Common operations without a bound, and their alternatives.
_REFUSED: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: DOT_PRODUCTS,
    nn.TransformerEncoderLayer: DOT_PRODUCTS,
    nn.TransformerDecoderLayer: DOT_PRODUCTS,
    nn.LayerNorm: _GROW + "BoundedLayerNorm",
    nn.GroupNorm: _GROW + "BoundedGroupNorm",
    nn.RMSNorm: "its slope grows as the input shrinks: use clipwise.layers.BoundedLayerNorm",
    PublicBatchNorm: "its slope grows as the deviation of the public rows shrinks: use "
    "clipwise.layers.BoundedGroupNorm",
    nn.RNNBase: "its slope grows with every position: use another strategy",
    nn.LogSoftmax: "give the logits to the loss",
    ReleasedStatisticsNorm: "its slope grows as the released deviation shrinks: use clipwise.layers.BoundedGroupNorm",
    nn.modules.batchnorm._BatchNorm: "it mixes examples: use clipwise.layers.BoundedGroupNorm",
    nn.modules.instancenorm._InstanceNorm: _GROW + "BoundedGroupNorm with one group per channel",
}


# Modules that are traced as a whole although they have a Python `forward`.
TRACED_AS_A_WHOLE = (ClipInput, BoundedGroupNorm, BoundedLayerNorm, PublicBatchNorm, BatchStatisticsNorm)


def require_no_hooks(name: str, module: nn.Module) -> None:
    """Refuse modules that could change a value or a gradient outside the traced graph."""
    if type(module).__name__ == "OptimizedModule":
        raise refusal(name, module, "a compiled model cannot be traced: give the model without torch.compile")
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise refusal(name, module, "its shapes are not known yet: run the model once before make_private")
    if has_code_of_its_own(module):
        raise refusal(name, module, "it has hooks or an overridden forward, which the bounds do not cover: remove them")


def require_no_global_hooks() -> None:
    """Refuse hooks that torch calls for every module."""
    if any(getattr(torch_modules, f"_global{hooks}") for hooks in HOOKS):
        raise UnsupportedModelError(
            "Lipschitz bounds: torch has hooks on all modules (torch.nn.modules.module.register_module_...), which "
            "the bounds do not cover: remove them."
        )


def require_rule(name: str, module: nn.Module) -> None:
    """Refuse a module without a rule."""
    if type(module) not in _MODULE_RULES:
        raise refusal(name, module, next((s for k, s in _REFUSED.items() if isinstance(module, k)), UNKNOWN))


def module_rule(call: Call) -> Rule:
    """The rule of a module, for one example's shapes."""
    require_rule(call.name, call.target)
    return _MODULE_RULES[type(call.target)](call)


_MODULE_RULES: dict[type[nn.Module], Build] = {
    kind: build
    for kinds, build in (
        (tuple(activations.MODULES), activations.activation_rule),
        ((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), activations.dropout_rule),
        ((nn.Linear,), LinearRule),
        ((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution.ConvolutionRule),
        ((nn.Embedding,), EmbeddingRule),
        (convolution.MAX, convolution.maximum_rule),
        (convolution.AVERAGE, convolution.average_rule),
        (convolution.ADAPTIVE_MAX + convolution.ADAPTIVE_AVERAGE, convolution.adaptive_rule),
        ((nn.Flatten, nn.Unflatten), lambda call: move_rule(call.out)),
        ((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), lambda call: pad_rule(call, call.target.padding)),
        ((ClipInput,), clip_input_rule),
        ((BoundedGroupNorm, BoundedLayerNorm), bounded_norm_rule),
    )
    for kind in kinds
}

_WEIGHTS = "a product with weights has a bound as a layer: use nn."


def function_rule(call: Call) -> Rule:
    """The rule of a function or a method."""
    target = call.target
    if target in _AS_MODULES:
        return _as_module(call)
    if target in _FUNCTION_RULES:
        return _FUNCTION_RULES[target](call)
    if isinstance(target, str) and target.endswith("_"):
        instead = "write it with an operator" if target.startswith("__") else f"use {target.rstrip('_')}"
        raise call.refusal(f"it changes a value in place: {instead}, which returns a new one")
    if target is getattr:
        raise call.refusal(f"operations on .{call.arguments[1]} are not in the graph: use the value itself")
    raise call.refusal(INSTEAD.get(target, UNKNOWN))


def _as_module(call: Call) -> Rule:
    kind, settings = _AS_MODULES[call.target]
    given = dict(zip(settings, call.arguments[1:], strict=False)) | dict(call.options)
    for ignored in ("input", "inplace", "training", "dtype", "_stacklevel"):  # without effect on the bound
        given.pop(ignored, None)
    if len(call.arguments) > 1 + len(settings) or set(given) - set(settings) or len(call.shapes) != 1:
        raise call.refusal("these arguments have no bound here: use the module of the same name")
    return module_rule(replace(call, target=kind(**given)))


def _two(rule: type[SumRule] | type[ProductRule]) -> Build:
    """x op y of two values, or of a value and a number."""

    def build(call: Call) -> Rule:
        # torch.add(x, 2, y) is the deprecated form of x + 2 y.
        if call.options or len(call.arguments) != 2:
            raise call.refusal("options such as alpha have no bound here: leave them out")
        if len(call.shapes) == 2:
            return rule(call)
        numbers = [a for a in call.arguments if isinstance(a, (int, float))]
        if len(numbers) != 1 or len(call.shapes) != 1:
            raise call.refusal("its operands must be values of the network or plain numbers")
        factor, shift = (1.0, numbers[0]) if rule is SumRule else (numbers[0], 0.0)
        return affine_rule(factor, call.rounding, shift)

    return build


def _divide(call: Call) -> Rule:
    divisor = call.option("other", 1)
    if len(call.shapes) != 1 or call.arguments[0] is not None or not isinstance(divisor, (int, float)):
        raise call.refusal("only division of a value by a plain number has a bound")
    if divisor == 0 or "rounding_mode" in call.options:
        raise call.refusal("division by 0 and rounding have no bound")
    return affine_rule(1 / divisor, call.rounding)


def _move(call: Call) -> Rule:
    """Reshaping that keeps the batch dimension and all entries, so each example keeps its own."""
    if math.prod(call.shapes[0]) != math.prod(call.out):
        raise call.refusal("it does not keep the entries of each example together")
    return move_rule(call.out)


def _squeeze(call: Call) -> Rule:
    """Requires dim: without it, a batch of one example would lose its batch dimension."""
    dims = call.option("dim", 1)
    if dims is None:
        raise call.refusal("it removes the batch dimension of a batch of one example: give dim")
    for dim in [dims] if isinstance(dims, int) else dims:
        call.own_dimension(dim, call.shapes[0])
    return move_rule(call.out)


def _swap(call: Call) -> Rule:
    call.own_dimension(call.option("dim0", 1))
    call.own_dimension(call.option("dim1", 2))
    return move_rule(call.out)


def _permute(call: Call) -> Rule:
    order = call.options.get("dims", call.arguments[1:])
    if len(order) == 1 and isinstance(order[0], (tuple, list)):
        order = order[0]
    if order[0] not in (0, -len(order)):
        call.own_dimension(0)
    return move_rule(call.out)


def _take(call: Call) -> Rule:
    index = call.arguments[1] if isinstance(call.arguments[1], tuple) else (call.arguments[1],)
    if not all(isinstance(i, (int, slice, type(None), type(Ellipsis))) for i in index):
        raise call.refusal("only numbers and slices have a bound as an index")
    if index[0] != slice(None):
        call.own_dimension(0)
    return move_rule(call.out)


def _join(call: Call) -> Rule:
    own = call.own_dimension(call.option("dim", 1, 0))
    return JoinRule(call.out, along_rows=own == len(call.out) - 1)


def _reduce(total: bool) -> Build:
    """The mean of n numbers has norm 1 / sqrt(n), their sum sqrt(n)."""

    def build(call: Call) -> Rule:
        dims, shape = call.option("dim", 1), call.shapes[0]
        if dims is None or set(call.options) - {"input", "dim", "keepdim"}:
            raise call.refusal("give dim, such that each example keeps its own value")
        owned = [call.own_dimension(d, shape) for d in ([dims] if isinstance(dims, int) else dims)]
        n = math.prod(shape[d] for d in owned)
        norm, most = (math.sqrt(n), float(n)) if total else (1 / math.sqrt(n), 1.0)
        return convolution.averaging_rule(call, norm, most)

    return build


def _pad(call: Call) -> Rule:
    if call.option("mode", 2, "constant") != "constant" or call.option("value", 3) not in (None, 0):
        raise call.refusal("only padding with zeros has a bound")
    return pad_rule(call, call.option("pad", 1))


def _multiply(call: Call) -> Rule:
    """Refused: a product of values is attention, and a product with weights should be a layer."""
    raise call.refusal(_WEIGHTS + "Linear" if call.has_weights else DOT_PRODUCTS)


# Common operations without a bound, and their alternatives.
INSTEAD: dict[Any, str] = {
    target: instead
    for targets, instead in (
        ((F.scaled_dot_product_attention,), DOT_PRODUCTS),
        ((F.linear,), _WEIGHTS + "Linear"),
        ((F.conv1d, F.conv2d, F.conv3d), _WEIGHTS + "Conv1d, 2d or 3d"),
        ((torch.stack,), "use torch.cat of x.unsqueeze(dim)"),
        ((torch.clamp, "clamp", torch.clip, "clip"), "use nn.Hardtanh(min, max), which is equivalent"),
        ((torch.amax, "amax", torch.max, "max"), "use nn.AdaptiveMaxPool1d, 2d or 3d"),
        ((torch.chunk, "chunk", torch.split, "split"), "use slices, such as x[:, :4]"),
        (("detach", torch.detach), "no gradient flows through it: leave it out"),
        (
            (F.layer_norm, F.group_norm),
            "its slope grows as the deviation shrinks: use clipwise.layers.BoundedLayerNorm or BoundedGroupNorm",
        ),
        ((F.log_softmax, torch.log_softmax, "log_softmax"), "give the logits to the loss"),
    )
    for target in targets
}
_WINDOWS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVERAGES = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_SIZES = ("output_size", "return_indices")
# Functions with an equivalent module, and the names of the arguments after the input.
_AS_MODULES: dict[Any, tuple[type[nn.Module], tuple[str, ...]]] = activations.FUNCTIONS | {
    function: (kind, settings)
    for functions, kinds, settings in (
        ((F.dropout,), (nn.Dropout,), ("p", "training", "inplace")),
        ((F.max_pool1d, F.max_pool2d, F.max_pool3d), convolution.MAX, _WINDOWS),
        ((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), convolution.AVERAGE, _AVERAGES),
        ((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d), convolution.ADAPTIVE_MAX, _SIZES),
        ((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), convolution.ADAPTIVE_AVERAGE, _SIZES),
    )
    for function, kind in zip(functions, kinds, strict=True)
}
_FUNCTION_RULES: dict[Any, Build] = {
    target: build
    for targets, build in (
        ((operator.add, operator.iadd, torch.add, "add", operator.sub, torch.sub, "sub"), _two(SumRule)),
        ((operator.mul, torch.mul, "mul"), _two(ProductRule)),
        ((operator.truediv, torch.div, "div"), _divide),
        ((operator.neg, torch.neg, "neg"), lambda call: affine_rule(1.0, call.rounding)),
        ((torch.flatten, "flatten", torch.reshape, "reshape", "view", "unflatten"), _move),
        (("contiguous", torch.unsqueeze, "unsqueeze"), _move),
        ((torch.squeeze, "squeeze"), _squeeze),
        ((torch.permute, "permute"), _permute),
        ((torch.transpose, "transpose"), _swap),
        ((operator.getitem,), _take),
        ((torch.cat, torch.concat), _join),
        ((torch.mean, "mean"), _reduce(total=False)),
        ((torch.sum, "sum"), _reduce(total=True)),
        ((torch.matmul, torch.bmm, torch.mm, "matmul", "bmm", "mm", operator.matmul), _multiply),
        ((F.pad,), _pad),
    )
    for target in targets
}
