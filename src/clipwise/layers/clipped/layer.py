"""What all clipped layers share."""

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
    """A layer with its input and its upstream gradient clipped, example by example.

    The input clip is a part of the function: it is there in training, in evaluation and in an exported model. The
    upstream clip is there in backward passes, and bounds what one example adds to the gradient of each parameter.

    Attributes:
        layer: the layer itself, with its parameters.
        constants: what it clips to. Others may be set, see `set_clips`.
        uses: how often a forward pass may use it, at most. What one example adds grows with it.
        name: how messages call it.
    """

    def __init__(self, layer: nn.Module, constants: Constants, uses: int = 1, name: str = "") -> None:
        super().__init__()
        self.layer, self.uses, self.name = layer, uses, name
        self.constants = constants

    @property
    def constants(self) -> Constants:
        """What it clips to."""
        return self._constants

    @constants.setter
    def constants(self, constants: Constants) -> None:
        self._constants = constants
        self._take(constants)

    def get_extra_state(self) -> Tensor:
        """What it clips to, for `state_dict`: a tensor, so that it can be kept where only tensors can."""
        c = self.constants
        numbers = [c.input_norm, c.grad_norm, MODES.index(c.mode), BOUNDS.index(c.bound)]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Clip to what was saved with the weights: with another input clip the network is another function."""
        try:
            input_norm, grad_norm, mode, bound = state.tolist()
            mode, bound = MODES[int(mode)], BOUNDS[int(bound)]
        except (AttributeError, ValueError, TypeError, IndexError):
            raise ConfigurationError(
                f"Layer {self.name!r}: the clips in this state_dict are damaged, or of another version. Load it with "
                "strict=False and without its '_extra_state', and give clip_inputs the constants of that model."
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
        """Make the roles that nodes of the next forward passes have. Earlier nodes keep theirs."""

    @abstractmethod
    def bounds(self) -> Mapping[str, float]:
        """The most that one use adds for one example to the gradient of each parameter of `layer`, in L2."""

    def extra_repr(self) -> str:
        c = self.constants
        return (
            f"input_norm={c.input_norm:g}, grad_norm={c.grad_norm:g}, mode={c.mode!r}, bound={c.bound!r}"
            + (f", uses={self.uses}" if self.uses > 1 else "")
        )

    def require_examples(self, x: object, least: int) -> Tensor:
        """A batch with the examples along its first axis: an example alone has no axis for them."""
        if not isinstance(x, Tensor):
            raise UnsupportedModelError(
                f"Layer {self.name!r} got {type(x).__name__}: backpropagation clipping takes tensors with the "
                "examples along the first axis. Pad sequences instead of packing them."
            )
        if x.dim() < least:
            raise ConfigurationError(
                f"Layer {self.name!r} got an input with {x.dim()} dimensions, where the first one must count "
                f"examples: it takes at least {least}."
            )
        return x


class OneInputLayer(ClippedLayer):
    """A clipped layer with one input and one output, which is one node of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        """Examples along the first axis, to the same; see the layer itself for the shapes."""
        x = self.require_examples(x, least=self._least_dimensions())
        return self._plain(x) if is_plain() else self._clipped(x)

    def _plain(self, x: Tensor) -> Tensor:
        """Without gradients."""
        y: Tensor = self.layer(x)
        return y

    @abstractmethod
    def _clipped(self, x: Tensor) -> Tensor:
        """As a node of the graph."""

    @abstractmethod
    def _least_dimensions(self) -> int:
        """Of an input, with the axis of examples."""


@dataclass(frozen=True)
class Role:
    """What a node of the graph is to a layer.

    Args:
        layer: whose node it is.
        constants: what it clips to.
        name: of this role in the layer, where it has several.
    """

    layer: ClippedLayer
    constants: Constants
    name: str = ""

    @property
    def is_present(self) -> bool:
        """Whether the layer still clips as it did when this role was made."""
        return self.constants == self.layer.constants


def trainable_clips(model: nn.Module) -> ClippedLayer | None:
    """A clipped layer that is trained, if there is one."""
    for module in model.modules():
        if isinstance(module, ClippedLayer) and any(p.requires_grad for p in module.parameters()):
            return module
    return None


def has_code_of_its_own(module: nn.Module) -> bool:
    """Whether a call of this module does not do what its class says: it has hooks, or a new `forward`."""
    return any(getattr(module, hooks) for hooks in HOOKS) or "forward" in vars(module)


def is_plain() -> bool:
    """Whether nobody will ask for gradients: in evaluation, and while torch writes down what a model does."""
    return not torch.is_grad_enabled() or torch.compiler.is_compiling() or bool(torch._C._is_tracing())
