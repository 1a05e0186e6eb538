"""Typical norms e_h of parameter groups, on public data or estimated from releases, for the constants of policies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import Parameters, Site
from clipwise.clipping.public import PublicData
from clipwise.clipping.vector_clipping import tensor_lengths
from clipwise.errors import ConfigurationError, UnreachedParametersError
from clipwise.gradients import Memory, per_example_gradients
from clipwise.gradients.real_views import dimension, real_view
from clipwise.layers.batch_statistics import BatchStatisticsNorm
from clipwise.layers.public_statistics import AllPublicStatistics
from clipwise.validation.arguments import number, with_plain_numbers
from clipwise.validation.random_state import fixed_random_state

OF = ("example", "microbatch")
_SMALLEST, _LARGEST = 1e-30, 1e30  # no underflow or overflow in float32
_FLOOR = 1e-3
_NOTHING = 1e-15  # norms are upper bounds: for a gradient of 0 they may be 1e-18


class Typical(ABC):
    """e_h of each group, at least a thousandth of the largest.

    A group with gradient 0 would otherwise get a clipping norm of 0, and never be trained again.
    """

    norms: dict[str, float]

    def observe(self, means: Mapping[str, Tensor], noise: Mapping[str, float]) -> None:  # noqa: B027 (most do not)
        """Process a release: the noised means by parameter, and the standard deviation of their noise."""

    @abstractmethod
    def renew(self) -> bool:
        """Update `norms`. Returns False, and keeps them, if no estimate is available."""

    def state_dict(self) -> dict[str, Any]:
        """The state in JSON types. It is public."""
        return {"typical": dict(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`. Raises if it is invalid."""
        self.norms = {h: number(h, state["typical"][h], least=_SMALLEST, most=_LARGEST) for h in self.norms}

    def _take(self, norms: Mapping[str, float]) -> bool:
        found = floored(norms)
        self.norms = self.norms if found is None else found
        return found is not None


class PublicNorms(Typical):
    """Norms on public data at the current weights, which are released, so the norms are public: see `mean_norms`."""

    def __init__(
        self, public: PublicData, site: Site, groups: Mapping[str, Sequence[str]], of: str, microbatch_size: int | None
    ) -> None:
        self._measure = partial(mean_norms, public, site.model, site.parameters, groups, of, microbatch_size)
        if not self.renew():
            raise ConfigurationError(
                f"On the public data ({public.name}) every gradient is 0 or not finite, so typical norms cannot be "
                "measured: check its loss."
            )

    def renew(self) -> bool:
        found = self._measure()
        return max(found.values()) > _NOTHING and self._take(found)


def floored(norms: Mapping[str, float]) -> dict[str, float] | None:
    """e_h, raised to at least a thousandth of the largest; None if the largest is out of range."""
    largest = max(norms.values())
    if not all(map(math.isfinite, norms.values())) or not _SMALLEST / _FLOOR <= largest <= _LARGEST:
        return None
    return {h: max(e, _FLOOR * largest) for h, e in norms.items()}


def mean_norms(
    public: PublicData,
    model: nn.Module,
    parameters: Parameters,
    groups: Mapping[str, Sequence[str]],
    of: str,
    microbatch_size: int | None,
) -> dict[str, float]:
    """e_h, the mean norm of each group's gradient over the public data.

    of="example": e_h = mean_i |g_ih| over examples. of="microbatch": e_h = mean_S |mean_{i in S} g_ih| over
    microbatches S of `microbatch_size` examples in the order of the data, without an incomplete last one. Examples with
    a norm that is not finite are omitted in every group. NaN if none are left.
    """
    if public.comes_in_batches and microbatch_size is not None:
        raise ConfigurationError("microbatch_size: not supported with public data in batches, the microbatches.")
    size = (microbatch_size or public.batch_size) if of == "microbatch" else None
    device = next(iter(parameters.values())).device
    # Accumulate on the device, to synchronize once and not for every batch.
    totals_H = torch.zeros(len(groups), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    # Public statistics depend on the weights only, so they stay valid for copies of the buffers.
    with AllPublicStatistics(model).held(), _undisturbed(model):
        memory = Memory()  # a new one, so that equal weights give bit-identical norms
        for number, batch in enumerate(public.batches(size), 1):
            losses = public.losses(model, batch, device, of)
            if size is not None and number * size > public.size and count and not public.comes_in_batches:
                continue  # the mean of fewer examples has a larger norm
            if of == "microbatch":
                squares = _of_the_mean(losses, parameters)
            else:
                squares = _of_each(losses, parameters, model, memory)
            # The parameters of a group may be on several devices.
            squares_HB = [torch.stack([squares[n].to(device) for n in names]).sum(0) for names in groups.values()]
            norms_HB = torch.stack(squares_HB).sqrt()
            finite_B = torch.isfinite(losses.detach()).to(device)
            finite_B = finite_B.all().reshape(1) if of == "microbatch" else finite_B
            counts_B = torch.isfinite(norms_HB).all(0) & finite_B
            totals_H += torch.where(counts_B, norms_HB, 0.0).sum(1)
            count += counts_B.sum()
    if not count:
        return dict.fromkeys(groups, math.nan)
    return dict(zip(groups, (totals_H / count).tolist(), strict=True))


def _of_the_mean(losses: Tensor, parameters: Parameters) -> dict[str, Tensor]:
    """|mean_i g_i|^2 of each parameter by autograd: examples may depend on each other."""
    found = torch.autograd.grad(losses.mean(), list(parameters.values()), allow_unused=True)
    reached = [g.to_dense() if g.is_sparse else g for g in found if g is not None]
    norms = iter(tensor_lengths(reached))
    nothing = torch.zeros(1, dtype=torch.float64, device=losses.device)
    both = zip(parameters, found, strict=True)
    return {name: nothing if g is None else next(norms).square().reshape(1) for name, g in both}


def _of_each(losses: Tensor, parameters: Parameters, model: nn.Module, memory: Memory) -> dict[str, Tensor]:
    """|g_i|^2 of each parameter. If a layer mixes examples, g_i is the gradient of loss i in this batch."""
    method = "loop" if any(map(_mixes, model.modules())) else "auto"
    try:
        return per_example_gradients(losses, parameters, memory, method).squared_norms()
    except UnreachedParametersError as refusal:
        left_out = refusal.names
    # Parameters that the public data does not use, such as those of an expert, have gradient 0.
    reached = {name: p for name, p in parameters.items() if name not in left_out}
    found = per_example_gradients(losses, reached, memory, method).squared_norms() if reached else {}
    return found | {name: torch.zeros(len(losses), dtype=torch.float64) for name in left_out}


def _mixes(module: nn.Module) -> bool:
    """Whether a module normalizes by the batch, as some batch norm layers do even in `.eval()`."""
    if isinstance(module, BatchStatisticsNorm):
        return module.training or not module.has_statistics
    batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return batch_norm and (module.training or module.running_mean is None)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """In this block the model uses copies of its buffers and a fixed random state. Both are restored afterwards."""
    kept = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    copies = {id(buffer): buffer.clone() for _, _, buffer in kept}
    try:
        for module, name, buffer in kept:
            module._buffers[name] = copies[id(buffer)]
        with fixed_random_state(0), torch.enable_grad():
            yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


@dataclass(frozen=True)
class ReleasedNorms:
    """Typical norms from the released gradients of the run, used instead of public data.

    The release of a step is g + noise with known variance, so for each group h of d_h coordinates

        |released g_h|^2 - sum of the noise's variances

    has mean |g_h|^2. Its running mean over about 1 / (1 - memory) steps is the estimate of e_h^2. Below the standard
    error of the running mean, e_h^2 is that standard error. Before the first release e_h = sqrt(d_h).

    This is the norm of the clipped *mean* gradient, so only ratios between groups are used, and rules that need e_h
    itself raise an error. With `Adaptive` the estimate of a clipped group is limited by its clipping norm.

    Args:
        memory: the factor of the running mean in each step, at least 0 and below 1.

    Guarantee:
        Post-processing of releases, at no privacy cost.
    """

    memory: float = 0.9

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        number("ReleasedNorms: memory", self.memory, least=0, below=1)

    def describe(self) -> dict[str, Any]:
        return {"released": "gradients of the run", "memory": float(self.memory)}


class Estimated(Typical):
    """`ReleasedNorms` for one model."""

    def __init__(self, rule: ReleasedNorms, parameters: Parameters, groups: Mapping[str, Sequence[str]]) -> None:
        self._memory = float(rule.memory)
        self._sizes = {h: {n: dimension(parameters[n]) for n in names} for h, names in groups.items()}
        self.norms = {h: math.sqrt(max(sum(sizes.values()), 1)) for h, sizes in self._sizes.items()}
        self._weight = 0.0  # total weight in the running means: 1 - memory^t
        self._squares = dict.fromkeys(groups, 0.0)
        self._variances = dict.fromkeys(groups, 0.0)

    def observe(self, means: Mapping[str, Tensor], noise: Mapping[str, float]) -> None:
        """With s the noise on each of d coordinates, |noise|^2 has mean d s^2 and variance 2 d s^4."""
        device = next(iter(means.values())).device
        names = [n for sizes in self._sizes.values() for n in sizes]
        energies = torch.stack([real_view(means[n]).double().square().sum().to(device) for n in names]).tolist()
        energy = dict(zip(names, energies, strict=True))
        if not all(map(math.isfinite, energies)):
            return
        keep, new = self._memory, 1 - self._memory
        self._weight = keep * self._weight + new
        for h, sizes in self._sizes.items():
            square = sum(energy[n] - d * noise[n] ** 2 for n, d in sizes.items())
            variance = sum(2 * d * noise[n] ** 4 for n, d in sizes.items())
            self._squares[h] = keep * self._squares[h] + new * square
            self._variances[h] = keep**2 * self._variances[h] + new**2 * variance

    def renew(self) -> bool:
        if self._weight == 0:
            return False
        hidden = {h: math.sqrt(v) for h, v in self._variances.items()}
        return self._take({h: math.sqrt(max(q, hidden[h], 0.0) / self._weight) for h, q in self._squares.items()})

    def state_dict(self) -> dict[str, Any]:
        running = {"weight": self._weight, "squares": dict(self._squares), "variances": dict(self._variances)}
        return super().state_dict() | {"running": running}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        running = state["running"]
        weight = number("weight", running["weight"])
        squares, variances = (
            {h: number(h, running[kind][h]) for h in self._sizes} for kind in ("squares", "variances")
        )
        super().load_state_dict(state)
        self._weight, self._squares, self._variances = weight, squares, variances
