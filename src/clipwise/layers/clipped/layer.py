"""The base classes of clipped layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.layers.clipped.scales import BOUNDS, MODES, Constants, clip_constant

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

    def __init__(self, layer: nn.Module, constants: Constants, uses: int = 1, name: str = "") -> None:
        super().__init__()
        self.layer, self.uses, self.name = layer, uses, name
        self.constants = constants

    @property
    def constants(self) -> Constants:
        """The clipping constants."""
        return self._constants

    @constants.setter
    def constants(self, constants: Constants) -> None:
        self._constants = constants
        self._take(constants)

    def get_extra_state(self) -> Tensor:
        """The constants, for `state_dict`: a tensor, for formats that hold only tensors."""
        c = self.constants
        numbers = [c.input_norm, c.grad_norm, MODES.index(c.mode), BOUNDS.index(c.bound)]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the constants saved with the weights: the input clip is part of the network's function."""
        try:
            input_norm, grad_norm, *choices = state.tolist()
            mode, bound = (names[int(i)] for names, i in zip((MODES, BOUNDS), choices, strict=True))
        except (AttributeError, ValueError, TypeError, IndexError):
            raise ConfigurationError(
                f"Layer {self.name!r}: the clipping constants in this state_dict are damaged, or of another version. "
                "Load it with strict=False and without its '_extra_state', and give clip_inputs the constants of that "
                "model."
            ) from None
        has = self.constants
        if (mode, bound) != (has.mode, has.bound):
            raise ConfigurationError(
                f"Layer {self.name!r} was saved with mode={mode!r} and bound={bound!r} and has mode={has.mode!r} and "
                f"bound={has.bound!r} here: call clip_inputs(..., mode={mode!r}, bound={bound!r}) before you load it."
            )
        input_norm, grad_norm = clip_constant("input_norm", input_norm), clip_constant("grad_norm", grad_norm)
        self.constants = Constants(input_norm, grad_norm, mode, bound)

    @abstractmethod
    def _take(self, constants: Constants) -> None:
        """Create the roles for graph nodes of the next forward passes. Earlier nodes keep theirs."""

    @abstractmethod
    def bounds(self) -> Mapping[str, float]:
        """The largest L2 norm of one example's gradient of each parameter of `layer`, for one use."""

    def extra_repr(self) -> str:
        c = self.constants
        return f"input_norm={c.input_norm:g}, grad_norm={c.grad_norm:g}, mode={c.mode!r}, bound={c.bound!r}" + (
            f", uses={self.uses}" if self.uses > 1 else ""
        )

    def refuse_if(self, **settings: tuple[object, str]) -> None:
        """Refuse a wrapped layer with one of these settings: each is given with its value and the remedy."""
        for setting, (value, remedy) in settings.items():
            if value:
                kind = type(self.layer).__name__
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

    def forward(self, x: Tensor) -> Tensor:
        """Shapes as for the wrapped layer, with examples along the first axis."""
        x = self.require_examples(x, least=self._least_dimensions())
        return self._plain(x) if is_plain() else self._clipped(x)

    def _plain(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y

    @abstractmethod
    def _clipped(self, x: Tensor) -> Tensor:
        """The forward pass as a node of the graph."""

    @abstractmethod
    def _least_dimensions(self) -> int:
        """The smallest number of input dimensions, including the examples."""


@dataclass(frozen=True)
class Role:
    """The layer of a graph node, its constants when the node was created, and the name of the node in the layer."""

    layer: ClippedLayer
    constants: Constants
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
