"""Compares certified bounds with true gradient norms, to show how much of the noise is due to loose bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.lipschitz.bounds import Bounds, bounds_of
from clipwise.lipschitz.losses import BoundedLoss, clip_output_gradients, constant_of, require_bounded
from clipwise.lipschitz.rule import Effort
from clipwise.lipschitz.trace import Network, trace
from clipwise.validation.arguments import naming, require_module


@dataclass(frozen=True)
class Tightness:
    """Bound and largest gradient norm of one parameter.

    Attributes:
        bound: the certified bound on an example's gradient norm.
        largest: the largest norm among the given examples.
        example: the index of that example.
    """

    bound: float
    largest: float
    example: int

    @property
    def ratio(self) -> float:
        """bound / largest, at least 1; infinite if every gradient is 0."""
        return self.bound / self.largest if self.largest > 0 else math.inf


def tightness(
    model: nn.Module, loss: BoundedLoss, inputs: Tensor, targets: Tensor, *, effort: Effort = "spectral"
) -> dict[str, Tightness]:
    """Bound and largest gradient norm of each trainable parameter, at the current weights.

    The largest norm is computed without noise: use public examples, or do not release the result. Gradients at the
    outputs are clipped to the loss's constant, as in a private step. Each example takes its own backward pass.

    Args:
        model: as for `trace`.
        loss: its constant is used for the bounds.
        inputs, targets: the examples, along the first dimension.
        effort: of the bounds, see `bounds_of`.
    """
    require_module(model)
    require_bounded(loss)
    for argument, given in (("inputs", inputs), ("targets", targets)):
        if not isinstance(given, Tensor) or given.dim() == 0:
            what = "a single number" if isinstance(given, Tensor) else type(given).__name__
            raise ConfigurationError(f"{argument} must be a tensor with the examples in its first axis, not {what}.")
    if len(inputs) == 0 or len(inputs) != len(targets):
        raise ConfigurationError("tightness: give at least one example, and as many targets as inputs.")
    network = trace(model, tuple(inputs.shape[1:]))
    constant = constant_of(loss, network.output_shape)
    bounds = bounds_of(network, constant, effort=effort).sensitivities
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and name in bounds}
    if not parameters:
        raise ConfigurationError("model has no trainable parameter with a bound: every requires_grad is False.")
    each = range(len(inputs))
    rows = [_norms(model, loss, constant, parameters, inputs[i : i + 1], targets[i : i + 1]) for i in each]
    largest_P, examples_P = torch.tensor(rows, dtype=torch.float64).max(0)
    return {
        name: Tightness(bounds[name], norm, example)
        for name, norm, example in zip(parameters, largest_P.tolist(), examples_P.tolist(), strict=True)
    }


def noise_of(bounds: Bounds, network: Network) -> float:
    """sum_k S_k sqrt(d_k): the norm of the noise over z, for the optimal split with one group per parameter."""
    sizes = {name: p.numel() for name, p in network.graph.named_parameters(remove_duplicate=False)}
    return sum(bound * math.sqrt(sizes[name]) for name, bound in bounds.sensitivities.items())


@torch.enable_grad()
def _norms(
    model: nn.Module, loss: BoundedLoss, constant: float, parameters: dict[str, nn.Parameter], x: Tensor, y: Tensor
) -> list[float]:
    with naming("inputs"):
        outputs = model(x)
    with naming("targets", "the loss"):
        losses = loss(outputs, y)
    (at_outputs,) = torch.autograd.grad(losses.sum(), outputs, retain_graph=True)
    found = torch.autograd.grad(outputs, list(parameters.values()), clip_output_gradients(at_outputs, constant))
    return [float(torch.linalg.vector_norm(g.double())) for g in found]
