"""What every way of clipping gives to the engine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.gradients.rare import PutAside
from clipwise.gradients.real_views import dimension
from clipwise.privacy import Adjacency, Part, Unit, effective_multiplier, split_noise
from clipwise.sampling import Scheme

Parameters = Mapping[str, torch.nn.Parameter]


Split = str | Mapping[str, float]  # how noise is divided: a policy, or a weight for each part


@dataclass(frozen=True)
class Site:
    """What a strategy is bound to: a model, what is trained of it, and how batches are drawn for whose privacy."""

    model: nn.Module
    parameters: Parameters
    adjacency: Adjacency
    unit: Unit
    scheme: Scheme
    empty_batch: Callable[[], Any] | None = (
        None  # a batch without records, which shows what batches look like
    )


@dataclass(frozen=True)
class Bound:
    """One part of the sum and the most that one unit can move it, in L2.

    A part without parameters is a vector beside the gradient, such as a count, or statistics of a layer.
    A part with `count_noise` gets noise of that standard deviation times the expected batch size; the others
    share what the noise multiplier then leaves. `scales` and `alone` are those of `privacy.Part`. `size` is how many
    entries are released: of its parameters, if not all; of a vector without parameters, if more than one.
    `share` is what all parts that have one take together of the privacy of a step; the others have the rest.
    """

    name: str
    parameters: tuple[str, ...]
    sensitivity: float
    count_noise: float | None = None
    scales: tuple[float, ...] = ()
    alone: bool = False
    size: int | None = None
    share: float | None = None


class Clipper(ABC):
    """A strategy bound to one model: turns losses into a bounded sum. It never draws noise.

    Attributes:
        bounds: what one unit can move, part by part.
        divisor: the public constant that the noised sum is divided by: how many clipped vectors it is expected to have.
        arithmetic: in which norms and sums are formed.
        lasts: for how many releases at least `learn` leaves the bounds as they are.
        is_capturable: whether a piece of a batch may be gathered by a CUDA graph: filled up with other rows to a
            constant size or, if the strategy is coupled, where its size is that of the captured one.
        needs_outputs: whether it takes the model's outputs too, by `sum_at_outputs`.
        draws: whether it draws random numbers, from `secret`. The engine sets that for each piece of a batch.
        parts: of the last release, with their noise. The engine sets them before `learn`.
        moves_weights: whether `follow` may change weights.
        moved: what the last `follow` multiplied parameters by. The network computes the same, with other weights.
    """

    bounds: tuple[Bound, ...]
    divisor: float
    arithmetic: Arithmetic = IEEE
    lasts: float = math.inf
    is_capturable: bool = True
    needs_outputs: bool = False
    draws: bool = False
    secret: bytes = b""
    parts: tuple[Part, ...] = ()
    moves_weights: bool = False
    moved: Mapping[str, float] = MappingProxyType({})
    _parameters: Parameters

    @property
    def noise(self) -> dict[str, float]:
        """s / (m L), the noise on each coordinate of what the last release gave for each parameter."""
        return {
            name: part.noise_std / (m * self.divisor)
            for part in self.parts
            for name, m in zip(part.parameters, part.scales or (1.0,) * len(part.parameters), strict=True)
        }

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """Entries that the sum holds 0 for and whose `.grad` is 0, by parameter: bool of its shape."""
        return {}

    def settle(self) -> None:  # noqa: B027 (most strategies freeze nothing)
        """Put frozen entries of the parameters back, after an optimizer has moved them."""

    def follow(self, is_updated: bool) -> bool:
        """Adapt to the weights as they are: after an update, or if anybody else has changed them.

        They follow from releases. Returns whether `bounds` changed.
        """
        return False

    def on_limit(self) -> dict[str, bool]:
        """Whether each parameter sits on the limit that its weights are clipped to, if there is one."""
        return {}

    def nothing(self) -> dict[str, Tensor]:
        """The bounded sum of an empty batch, or of an empty piece: zeros. It needs no losses."""
        return {name: torch.zeros_like(p) for name, p in self._parameters.items()}

    def sum_at_outputs(self, losses: Tensor, outputs: Tensor | None) -> dict[str, Tensor]:
        """`clipped_sum`, for a strategy that looks at the model's outputs as well."""
        return self.clipped_sum(losses)

    @abstractmethod
    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """The bounded sum over the examples of a batch, or of a piece of one.

        By parameter; a part that has none stands there under its own name. `real_B` marks the examples that
        count, where a batch was filled up to a constant size with others.
        """

    def clipped_update(self, batch: Any) -> dict[str, Tensor]:
        """The bounded sum of a batch, for a strategy with a local update."""
        raise NotImplementedError

    @abstractmethod
    def putting_aside(self) -> AbstractContextManager[PutAside]:
        """In this block nothing waits for the device: what hardly ever happens is put aside, to be looked at."""

    def look_again(self) -> None:  # noqa: B027 (most strategies look by themselves)
        """The next ordinary step makes all of its checks: those before it were replayed."""

    def learn(self, means: Mapping[str, Tensor]) -> bool:
        """Adapt to what a step released, the gradient and what is beside it: noised, over the divisor.

        Returns whether `bounds` changed. Between two releases they stay.
        """
        return False

    def clips(self) -> object:
        """All that `clipped_sum` goes by and `learn` may change, to compare with what it was."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What was learned so far, in plain types. It follows from releases, and may be published."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go back to what a `state_dict` of the same strategy holds. Returns whether `bounds` changed."""
        return False


class Strategy(ABC):
    """A way to bound what one unit can do to the released sum. Only configuration: no model, no private data.

    Attributes:
        unit: whose privacy it protects.
        split: how noise is divided over parts.
        is_coupled: whether the bound holds although examples of a batch depend on one another.
        bounds_inside: whether it bounds gradients inside the network, so that a loss must come from its outputs.
        takes_views: whether an example may have several rows in a batch.
        clips_whole_blocks: whether everything that a mini-set of records adds to the release is clipped as a whole.
            Only then can another block of a partition stand in for the one that holds a record.
        takes_complex: whether parameters may be complex. They count as pairs of real ones.
        has_local_update: whether it computes the update of a batch itself, by `Clipper.clipped_update`, and takes no
            losses.
    """

    unit: Unit = Unit.RECORD
    split: Split
    is_coupled: bool = False
    bounds_inside: bool = False
    takes_views: bool = True
    clips_whole_blocks: bool = False
    takes_complex: bool = False
    has_local_update: bool = False

    @abstractmethod
    def attach(self, site: Site) -> Clipper:
        """Bind to a model's trainable parameters, or refuse the combination."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The configuration in plain types, for fingerprints and statements."""


def require_entries(parameters: Parameters, strategy: str) -> None:
    """Refuse empty parameters, for a strategy that bounds whole layers."""
    for name, p in parameters.items():
        if p.numel() == 0:
            raise ConfigurationError(
                f"Parameter {name!r} has no entries, and {strategy} has no bound for a layer without any: take the "
                "layer out of the model."
            )


def noised_parts(
    bounds: Sequence[Bound],
    parameters: Parameters,
    noise_multiplier: float,
    split: Split,
    expected_size: float,
) -> tuple[Part, ...]:
    """The parts of a step with their noise, such that the joint mechanism has `noise_multiplier`.

    Counts have a noise of their own; the other parts divide by `split` what is left of the multiplier. Parts that
    a unit moves alone need not divide: each has all of it. Without noise, for debugging, no part has any.

    Parts with a share a have the multiplier z / sqrt(a) together, and those without z / sqrt(1 - a): jointly
    a / z^2 + (1 - a) / z^2 = 1 / z^2.
    """
    own = {b: b.count_noise * expected_size for b in bounds if b.count_noise is not None}
    rest = [b for b in bounds if b not in own]
    z = noise_multiplier
    if own and z > 0:
        z = _multiplier_left(own, z, expected_size)
    elif own:
        own = dict.fromkeys(own, 0.0)
    main, beside = [b for b in rest if b.share is None], [b for b in rest if b.share is not None]
    share = max((b.share for b in beside if b.share is not None), default=0.0)
    assert all(b.share == share for b in beside)
    stds = own | _divided(main, parameters, z / math.sqrt(1 - share), split)
    if beside:
        stds |= _divided(
            beside, parameters, z / math.sqrt(share), split if isinstance(split, str) else "optimal"
        )
    parts = tuple(Part(b.name, b.parameters, b.sensitivity, stds[b], b.scales, b.alone) for b in bounds)
    if effective_multiplier(parts) < noise_multiplier:
        # Bounds may change from step to step and the event does not: rounding must not bring a step below it.
        return tuple(replace(p, noise_std=p.noise_std * (1 + 2.0**-40)) for p in parts)
    return parts


def _divided(
    bounds: Sequence[Bound], parameters: Parameters, noise_multiplier: float, split: Split
) -> dict[Bound, float]:
    """The noise of each such that together they have the multiplier."""
    z = noise_multiplier
    if any(b.alone for b in bounds):
        assert all(b.alone for b in bounds)
        if not isinstance(split, str):
            raise ConfigurationError(
                "split: weights do not go with RandomLayer, where each part has all of the noise multiplier: leave "
                "split out."
            )
        found = [z * b.sensitivity for b in bounds]
    elif isinstance(split, str):
        sizes = [
            sum(dimension(parameters[n]) for n in b.parameters) if b.size is None else b.size for b in bounds
        ]
        found = split_noise([b.sensitivity for b in bounds], sizes, z, split)
    else:
        found = _by_weights(bounds, z, split)
    return dict(zip(bounds, found, strict=True))


def _by_weights(
    bounds: Sequence[Bound], noise_multiplier: float, weights: Mapping[str, float]
) -> list[float]:
    """s_k = z S_k sqrt(sum_j p_j^2) / p_k: a part with a larger weight p gets less noise."""
    if not isinstance(weights, Mapping):
        raise ConfigurationError(
            f"split={weights!r} is not known: use 'optimal', 'equal' or a weight for each part."
        )
    names = [b.name for b in bounds]
    numbers = [w for w in weights.values() if isinstance(w, (int, float)) and math.isfinite(w) and w > 0]
    if sorted(weights) != sorted(names) or len(numbers) < len(names):
        raise ConfigurationError(
            f"split: give a positive number for each of the parts {', '.join(map(repr, names))}, and for no other."
        )
    whole = math.hypot(*weights.values())
    return [noise_multiplier * b.sensitivity * whole / weights[b.name] for b in bounds]


def _multiplier_left(counts: Mapping[Bound, float], noise_multiplier: float, expected_size: float) -> float:
    """z' = z / sqrt(1 - u), with u = sum_j (z S_j / s_j)^2 the share of the counts.

    The same as z'^-2 + sum_j (S_j / s_j)^2 = z^-2.
    """
    # Bounds change from step to step and the event does not: rounding must not bring a step below it.
    z = noise_multiplier * (1 + 2.0**-30)
    used = math.hypot(*(z * b.sensitivity / std for b, std in counts.items()))  # sqrt(u)
    if used >= 1:
        enough = 2 * used * max(counts.values()) / expected_size
        raise ConfigurationError(
            f"count_noise is too small: at an expected batch size of {expected_size:g} and with {len(counts)} of them "
            f"the counts alone use up noise_multiplier={noise_multiplier:.4g}, and leave nothing for the gradient. "
            f"Give count_noise={enough:.2g} or more, or take larger batches or fewer parts."
        )
    return z / math.sqrt(1 - used * used)
