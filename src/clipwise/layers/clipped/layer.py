"""The base classes of clipped layers, and their scale factors from upper bounds of norms, in float64, one per example.

Scaled vectors aim slightly below their bound, to allow for rounding. n is never below the true norm, and it bounds the
sum of the absolute terms of a gradient, not only their sum. The rounding error of a product is therefore a small
fraction of n, even if terms cancel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipwise import kernels
from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.gradients.forms import squared_norms
from clipwise.kernels.factors import Limits, Norms, gradient_factors
from clipwise.kernels.weighted import weighted_sum
from clipwise.layers.clipped import switch
from clipwise.validation.arguments import number

MODES = ("clip", "normalize")
BOUNDS = ("upstream", "gradient")

# Fraction of a bound. Sums over positions have a smaller error: they run in blocks, with u = 2^-24 per term.
AIM = 1 - 2.0**-10
# The smallest s and nu: an example with a smaller factor counts as 0. Gradients are scaled by s nu in float32, where
# numbers below 2^-126 are subnormal, with an error of 2^-150, possibly upwards.
_SMALLEST_INPUT, _SMALLEST = 2.0**-50, 2.0**-76
LEFT_OF_MASS = 2.0**-6
# "normalize" scales a gradient shorter than this by C2 / _SHORTEST, not up to its bound: it may be rounding error,
# which depends on the batch. The error for losses of ordinary size, about 2^-24, becomes 2^-10 of a bound.
_SHORTEST = 2.0**-14
_LEAST = 2.0**-100  # gradients with a smaller norm are not scaled: it is far below any constant
_LONGEST = 2.0**120  # norm of a scaled-up gradient: float32 ends at 2^128
_SMALLEST_CONSTANT, _LARGEST_CONSTANT = 1e-10, 1e10
LIMITS = Limits(AIM, _LEAST, _SMALLEST, _SMALLEST_INPUT)  # for kernels with the same formulas


@dataclass(frozen=True)
class ClipConstants:
    """The constants C1 and C2, mode and bound of one layer. See `clip_inputs`."""

    input_norm: float
    grad_norm: float
    mode: str = "clip"
    bound: str = "gradient"

    @property
    def weight_norm(self) -> float:
        """The largest contribution of one example to the gradient of the weights: C1 C2."""
        return self.input_norm * self.grad_norm

    @property
    def most(self) -> float:
        """The largest scale of a gradient: 1 in mode "clip"; C2 over the shortest gradient in mode "normalize"."""
        return 1.0 if self.mode == "clip" else self.grad_norm / _SHORTEST


def along(values_B: Tensor, like: Tensor, axis: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """One number per example, broadcastable to a tensor, and by default in its dtype."""
    shape = [1] * like.dim()
    shape[axis] = -1
    return values_B.to(dtype or like.dtype).view(shape)


def squared_lengths(rows_Rn: Tensor) -> Tensor:
    """An upper bound on |row|^2 of each row, in float64, also if squares overflow float32."""
    found_R = squared_norms(rows_Rn)
    if found_R.is_cuda or not len(found_R) or float(found_R.max()) < math.inf:  # False for NaN
        return found_R
    return squared_norms(rows_Rn.double())


def lengths(rows: Tensor) -> Tensor:
    """An upper bound on |row| of each example, [B]."""
    return squared_lengths(rows.reshape(len(rows), math.prod(rows.shape[1:]))).sqrt()


def input_scales(norm_B: Tensor, input_norm: float) -> Tensor:
    """min(1, C1 / |x|); 0 for an example that is not finite or longer than 2^50 C1."""
    scale_B = (AIM * input_norm / norm_B).masked_fill(norm_B <= input_norm, 1.0)
    return scale_B.masked_fill(~(norm_B <= AIM * input_norm / _SMALLEST_INPUT), 0.0)  # True for NaN


def upstream_scales(norm_B: Tensor, bound: float | None, most: float) -> Tensor:
    """nu = min(most, C / n), so that n nu <= C. A norm of 0 stays 0.

    Without a bound nothing is clipped: 1 if the norm is finite, else 0.
    """
    if bound is None:
        return torch.isfinite(norm_B).double()
    nu_B = (AIM * bound / norm_B).clamp(max=most)
    nu_B = nu_B.masked_fill(norm_B <= _LEAST, 1.0)
    return nu_B.masked_fill(~(norm_B <= AIM * bound / _SMALLEST), 0.0)


def kernel_scales(norms: Norms, bound: float | None, most: float) -> Tensor:
    """`upstream_scales` by a kernel, from norms measured by kernels. Records nu for a compiled step."""
    nu_B = gradient_factors(norms, bound, most, LIMITS)
    switch.noted(nu_B)
    return nu_B


def fits(t: Tensor) -> bool:
    """Whether kernels support this tensor: on a GPU, not float64."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return kernels.usable(t) and t.numel() > 0 and t.dtype in dtypes


def cleaned(t: Tensor, factor_B: Tensor, axis: int = 0) -> Tensor:
    """Set rows with factor 0 (or False) to 0, since 0 times NaN is NaN; unless a compiled step records the factors."""
    if switch.noted(factor_B):
        return t
    if not factor_B.is_cuda and (not len(factor_B) or float(factor_B.min()) > 0):
        return t
    return torch.where(along(factor_B > 0, t, axis, torch.bool), t, 0)


def scaled(t: Tensor, factor_B: Tensor, axis: int = 0) -> Tensor:
    """Each example times its factor, as a new tensor: 0 where the factor is 0."""
    return cleaned(t, factor_B, axis) * along(factor_B, t, axis)


def clipped_input(x: Tensor, input_norm: float) -> Tensor:
    """x min(1, C1 / |x|) per example, in operations that torch can export."""
    norm_B = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    scale_B = input_scales(norm_B, input_norm)
    return torch.where(along(torch.isfinite(norm_B), x, dtype=torch.bool), x * along(scale_B, x), 0)


def weighted_rows(rows_Bn: Tensor, mass_Bn: Tensor | None, c: ClipConstants) -> Tensor:
    """sum_i nu_i row_i, where a row is an example's whole gradient, clipped to C2 by its exact norm.

    If far larger terms cancel in a row (`mass_Bn` holds their absolute sums), the row may be rounding error, which may
    depend on the other examples. Its norm is therefore taken to be at least 2^-6 of the mass, so that "normalize" keeps
    rounding error small. (An example is the bias of attention keys, whose gradient is 0.)
    """
    bound = c.grad_norm if switch.is_clipping() else None
    if fits(rows_Bn):
        norms = Norms(rows_Bn, mass_Bn, second_times=LEFT_OF_MASS, takes_larger=True)
        return weighted_sum(rows_Bn, kernel_scales(norms, bound, c.most))
    norm_B = lengths(rows_Bn)
    if mass_Bn is not None and bound is not None:
        norm_B = torch.maximum(norm_B, LEFT_OF_MASS * lengths(mass_Bn))
    nu_B = upstream_scales(norm_B, bound, c.most)
    return scaled(rows_Bn, nu_B).sum(0)


def at_least_shortest(lengths_BGP: Tensor, bound: float) -> Tensor:
    """Clamp window norms to at least C / 2^120, in place; then n is at least that times |g|.

    So C / n times g is finite in float32, even for a long gradient and a tiny input.
    """
    return lengths_BGP.clamp_(min=max(bound / _LONGEST, torch.finfo(torch.float32).tiny))


def clip_constant(name: str, value: object) -> float:
    """Validate a clipping constant; errors name the argument."""
    return number(name, value, least=_SMALLEST_CONSTANT, most=_LARGEST_CONSTANT)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module


class ClippedLayer(nn.Module, ABC):
    """A layer with input and upstream gradient clipped per example.

    The input clip is part of the function, in training, evaluation and an exported model. The upstream clip applies in
    backward passes, and bounds one example's contribution to the gradient of each parameter.

    Attributes:
        layer: the wrapped layer, with its parameters.
        constants: the clipping constants; `set_clips` changes them.
        uses: the maximum number of uses per forward pass. The sensitivity grows with it.
        name: the name used in messages.
    """

    def __init__(self, layer: nn.Module, constants: ClipConstants, uses: int = 1, name: str = "") -> None:
        super().__init__()
        self.layer, self.uses, self.name, self.constants = layer, uses, name, constants

    @property
    def constants(self) -> ClipConstants:
        return self._constants

    @constants.setter
    def constants(self, constants: ClipConstants) -> None:
        self._constants = constants
        self._take(constants)

    def get_extra_state(self) -> Tensor:
        """The constants, for `state_dict`: a tensor, for formats that hold only tensors."""
        c = self.constants
        numbers = [c.input_norm, c.grad_norm, MODES.index(c.mode), BOUNDS.index(c.bound)]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the constants saved with the weights: the input clip is part of the network's function."""
        input_norm, grad_norm, mode_number, bound_number = state.tolist()
        mode, bound = MODES[int(mode_number)], BOUNDS[int(bound_number)]
        if (mode, bound) != (self.constants.mode, self.constants.bound):
            raise ConfigurationError(
                f"Layer {self.name!r} was saved with other settings than it has here: call clip_inputs(..., "
                f"mode={mode!r}, bound={bound!r}) before you load it."
            )
        input_norm, grad_norm = clip_constant("input_norm", input_norm), clip_constant("grad_norm", grad_norm)
        self.constants = ClipConstants(input_norm, grad_norm, mode, bound)

    def _take(self, constants: ClipConstants) -> None:
        """Create the roles for graph nodes of the next forward passes. Earlier nodes keep theirs."""
        self._role = Role(self, constants)

    @abstractmethod
    def bounds(self) -> Mapping[str, float]:
        """The largest L2 norm of one example's gradient of each parameter of `layer`, for one use."""

    def extra_repr(self) -> str:
        c, uses = self.constants, f", uses={self.uses}" if self.uses > 1 else ""
        return f"input_norm={c.input_norm:g}, grad_norm={c.grad_norm:g}, mode={c.mode!r}, bound={c.bound!r}{uses}"

    def refuse_if(self, **settings: tuple[object, str]) -> None:
        """Refuse a wrapped layer with one of these settings: each is given with its value and the remedy."""
        kind = type(self.layer).__name__
        for setting, (value, remedy) in settings.items():
            if value:
                raise UnsupportedModelError(
                    f"Layer {self.name!r} ({kind}) has {setting} set, which has no bound here: {remedy}."
                )

    def require_examples(self, x: object, least: int) -> Tensor:
        """Require a tensor with examples along the first axis."""
        if not isinstance(x, Tensor):
            raise UnsupportedModelError(
                f"Layer {self.name!r} got {type(x).__name__}: backpropagation clipping takes tensors with the "
                "examples along the first axis. Pad sequences instead of packing them."
            )
        if x.dim() < least:
            raise ConfigurationError(
                f"Layer {self.name!r} got an input with {x.dim()} dimensions: it needs at least {least}, with "
                "the examples along the first."
            )
        return x


class OneInputLayer(ClippedLayer):
    """A clipped layer with one input and one output, which is one node of the graph."""

    @property
    def least_dimensions(self) -> int:
        """The smallest number of input dimensions, including the examples."""
        return 2

    def forward(self, x: Tensor) -> Tensor:
        """Shapes as for the wrapped layer, with examples along the first axis."""
        x = self.require_examples(x, self.least_dimensions)
        return self._plain(x) if is_plain() else self._clipped(x)

    def _plain(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y

    @abstractmethod
    def _clipped(self, x: Tensor) -> Tensor:
        """The forward pass as a node of the graph."""


@dataclass(frozen=True)
class Role:
    """The layer of a graph node, its constants when the node was created, and the name of the node in the layer."""

    layer: ClippedLayer
    constants: ClipConstants
    name: str = ""

    @property
    def is_present(self) -> bool:
        """Whether the constants of the layer are still the same."""
        return self.constants == self.layer.constants


def trainable_clips(model: nn.Module) -> ClippedLayer | None:
    """A clipped layer with trainable parameters, or None."""
    for module in model.modules():
        if isinstance(module, ClippedLayer) and any(p.requires_grad for p in module.parameters()):
            return module
    return None


def has_code_of_its_own(module: nn.Module) -> bool:
    """Whether a module has hooks or an overridden `forward`, so that its class does not define what a call does."""
    return any(getattr(module, hooks) for hooks in HOOKS) or "forward" in vars(module)


def is_plain() -> bool:
    """Whether no gradients are needed: in evaluation, and while torch traces or compiles a model."""
    return not torch.is_grad_enabled() or torch.compiler.is_compiling() or bool(torch._C._is_tracing())
