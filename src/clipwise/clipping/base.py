"""The interfaces of a clipping strategy and of its clipper, and the division of the noise of a step over its parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from clipwise.errors import CheckpointError, ConfigurationError
from clipwise.gradients import Memory, per_example_gradients
from clipwise.gradients.precision import IEEE, Arithmetic, PutAside
from clipwise.gradients.real_views import dimension, own_part
from clipwise.privacy import Adjacency, Part, Unit, effective_multiplier, split_noise
from clipwise.sampling.base import Scheme

if TYPE_CHECKING:
    from clipwise.clipping.public import PublicData


Parameters = Mapping[str, torch.nn.Parameter]
Split = str | Mapping[str, float]  # "optimal", "equal", or a weight for each part
_SEPARATE = (
    "the contribution of a microbatch depends only on that microbatch, on released values and on fresh random numbers: "
    "not proven (examples of the same microbatch may depend on each other)"
)


@dataclass(frozen=True)
class Site:
    """The inputs of `Strategy.attach`: a model, its trainable parameters, the sampling scheme and the unit."""

    model: nn.Module
    parameters: Parameters
    adjacency: Adjacency
    unit: Unit
    scheme: Scheme
    empty_batch: Callable[[], Any] | None = None  # makes a batch without records
    # From the squared norms [B] of the parts of gradients in this process to those of whole gradients, if they differ.
    joined_squares: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    @property
    def factor(self) -> float:
        """Sensitivity over clipping norm: 2 under replace-one, where one vector leaves the sum and another enters."""
        return 2.0 if self.adjacency is Adjacency.REPLACE_ONE else 1.0


@dataclass(frozen=True)
class Bound:
    """One part of the sum and its L2 sensitivity.

    A part without parameters is a vector released with the gradient: a count, or the statistics of a layer.
    """

    name: str
    parameters: tuple[str, ...]
    sensitivity: float
    # The noise on a count, over the expected batch size. The other parts share what remains of the noise multiplier.
    count_noise: float | None = None
    scales: tuple[float, ...] = ()  # as in `privacy.Part`
    alone: bool = False  # as in `privacy.Part`
    size: int | None = None  # the number of released entries, if it is not that of the parameters (without them, 1)
    share: float | None = None  # the fraction of the privacy of a step used by all parts with a share together


class Clipper(ABC):
    """A strategy bound to one model. It computes the bounded sum from losses, and never draws noise."""

    bounds: tuple[Bound, ...]  # the parts of the sum and their sensitivities
    divisor: float  # the public constant that divides the noised sum: the expected number of clipped vectors
    arithmetic: Arithmetic = IEEE  # of norms and sums
    lasts: float = math.inf  # the fewest releases between changes of the bounds by `learn`
    # Whether a CUDA graph may compute the sum of a piece of a batch: padded to a constant size or, if the strategy is
    # coupled, of the captured size.
    is_capturable: bool = True
    is_traceable: bool = True  # whether `clipped_sum` may be traced into one graph (engine/tracing.py)
    needs_outputs: bool = False  # whether it needs the model's outputs, by `sum_at_outputs`
    draws: bool = False  # whether it draws random numbers from `secret`
    secret: bytes = b""  # set by the engine for each piece of a batch
    parts: tuple[Part, ...] = ()  # of the last release, with their noise. The engine sets them before `learn`
    adapts: bool = True  # whether releases can change bounds or weights: by `follow`, `learn`, `frozen` and `settle`
    moves_weights: bool = False  # whether `follow` may change weights
    # The factors by which the last `follow` multiplied parameters. The network computes the same function.
    moved: Mapping[str, float] = MappingProxyType({})
    _parameters: Parameters

    @abstractmethod
    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """The bounded sum over the examples of a batch or of a piece of it, by parameter name or part name.

        `real_B` is False for padding rows, which contribute 0.
        """

    def sum_at_outputs(self, losses: Tensor, outputs: Tensor | None) -> dict[str, Tensor]:
        """`clipped_sum` for a strategy that needs the model's outputs."""
        raise NotImplementedError

    def clipped_update(self, batch: Any) -> dict[str, Tensor]:
        """The bounded sum of a batch for a strategy with a local update."""
        raise NotImplementedError

    def nothing(self) -> dict[str, Tensor]:
        """The bounded sum of an empty batch: zeros."""
        return {name: torch.zeros_like(own_part(p)) for name, p in self._parameters.items()}

    @property
    def noise(self) -> dict[str, float]:
        """s / (m L): the standard deviation of the noise on each coordinate of the last release, by parameter."""
        return {
            name: part.noise_std / (m * self.divisor)
            for part in self.parts
            for name, m in zip(part.parameters, part.scales or (1.0,) * len(part.parameters), strict=True)
        }

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """Frozen entries by parameter (bool, of its shape): their sum and their `.grad` are 0."""
        return {}

    def settle(self) -> None:  # noqa: B027 (most strategies freeze nothing)
        """Restore frozen entries of the parameters after an optimizer step."""

    def follow(self, is_updated: bool) -> bool:
        """Adapt to the current (released) weights. Returns whether `bounds` changed."""
        return False

    def on_limit(self) -> dict[str, bool]:
        """Whether each parameter is at its weight norm limit, if it has one."""
        return {}

    @contextmanager
    def putting_aside(self) -> Iterator[PutAside]:
        """In this block nothing waits for the device: checks for rare events are collected and read later."""
        yield PutAside()

    def look_again(self) -> None:  # noqa: B027 (most strategies make all checks in every step)
        """Make the next eager step run all of its checks, after steps that were replayed."""

    def learn(self, means: Mapping[str, Tensor]) -> bool:
        """Adapt to the release of a step: the noised sums over the divisor. Returns whether `bounds` changed."""
        return False

    def clips(self) -> object:
        """The state that `clipped_sum` depends on and that `learn` may change, for comparison."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The learned state in JSON types. It follows from releases, so it is public."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a `state_dict` of the same strategy. Returns whether `bounds` changed."""
        return False


@dataclass(frozen=True)
class StatementText:
    """The text of a privacy statement that depends on the strategy."""

    sum: str = "the clipped sum"  # the noised sum of a step
    released: str = ""  # releases besides gradients and weights
    separate: str = ""  # the assumption that replaces "each loss depends on its own example only", if any
    assumptions: tuple[str, ...] = ()  # further assumptions
    changing: str = ""  # a sentence after the sensitivities, if they change from step to step
    public_data: str = ""  # the public data and its use


class Strategy(ABC):
    """The configuration of a clipping strategy, without model or data. No code outside of clipping/ tests its type."""

    name: ClassVar[str]  # in ledgers and checkpoints: the value of "strategy" in `describe`
    unit: Unit = Unit.RECORD
    split: Split = "optimal"
    is_coupled: bool = False  # whether the bound holds even if examples of a batch depend on each other
    # Whether it bounds gradients inside the network, so that losses must be computed from its outputs.
    bounds_inside: bool = False
    takes_views: bool = True  # whether an example may have several rows in a batch
    # Whether the contribution of a microbatch is clipped as a whole, as partition sampling requires. The loader then
    # yields a batch one microbatch at a time.
    clips_whole_blocks: bool = False
    microbatches: int = 1  # per batch, if it clips whole ones
    protects_users: bool = False  # whether the unit may be a user, with all records of the user as one microbatch
    takes_complex: bool = False  # whether parameters may be complex. They are treated as pairs of real numbers
    has_local_update: bool = False  # whether it takes no losses, and computes an update by `Clipper.clipped_update`
    allows_batch_norm: bool = False  # whether `attach` itself checks normalization layers
    needs_whole_weights: str = ""  # what reads or changes whole weights outside of a forward pass, and so no shards
    takes_split_gradients: bool = False  # whether an example's gradient may lie over several processes

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in cls.__dict__:
            other = _RECORDED.setdefault(cls.name, cls)
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ConfigurationError(f"{cls.__name__}.name={cls.name!r} is already the name of {other.__name__}.")
            _RECORDED[cls.name] = cls

    @abstractmethod
    def attach(self, site: Site) -> Clipper:
        """Bind to a model, or raise if the strategy does not support it."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The configuration in JSON types, for fingerprints and statements, with the `name` as "strategy"."""

    @classmethod
    def statement_text(cls, recorded: Mapping[str, Any], unit: Unit) -> StatementText:
        """The text of the statement for a configuration recorded by `describe`."""
        unknown: tuple[str, ...] = ()
        name = recorded.get("strategy")
        if name is not None and name not in _RECORDED:
            unknown = (f"the strategy {name!r} satisfies its recorded sensitivities (its code is not loaded here)",)
        return StatementText(separate=_SEPARATE if cls.is_coupled else "", assumptions=unknown)

    def require_views(self) -> None:
        """Raise if examples cannot have several rows."""
        if not self.takes_views:
            raise ConfigurationError(
                f"augmentation_multiplicity is not supported with {type(self).__name__}, which clips each row "
                "separately: remove it, or use PerExample."
            )

    def require_losses(self, losses: Tensor, model: nn.Module, parameters: Parameters) -> None:
        """Raise if the first step would reject these losses; for `clipwise.check`."""
        per_example_gradients(losses, parameters, Memory())

    def public_data(self) -> tuple[PublicData, ...]:
        """The public data that the strategy uses."""
        return ()


_RECORDED: dict[str, type[Strategy]] = {}


def recorded_strategy(recorded: Any) -> type[Strategy]:
    """The class of a strategy from its recorded description; `Strategy` itself if unknown."""
    name = recorded.get("strategy") if isinstance(recorded, Mapping) else None
    return _RECORDED.get(str(name), Strategy)  # no instance is made


def require_entries(parameters: Parameters, strategy: str) -> None:
    """Raise if a parameter is empty; for strategies that bound whole layers."""
    for name, p in parameters.items():
        if p.numel() == 0:
            raise ConfigurationError(
                f"Parameter {name!r} is empty, which {strategy} does not support: remove the layer from the model."
            )


def damaged(what: str) -> CheckpointError:
    """The error for an invalid `state_dict`."""
    return CheckpointError(f"This state_dict of a private run is damaged: {what}. Use the one saved before it.")


def require_split(split: object) -> None:
    """Raise if `split` is neither "optimal" or "equal" nor a mapping of weights."""
    if not (isinstance(split, Mapping) or (isinstance(split, str) and split in ("optimal", "equal"))):
        raise ConfigurationError(
            f"split={split!r} is not known: use one of 'optimal', 'equal', or give a positive weight for each part."
        )


def noised_parts(
    bounds: Sequence[Bound], parameters: Parameters, noise_multiplier: float, split: Split, expected_size: float
) -> tuple[Part, ...]:
    """The parts of a step with their noise, such that the joint mechanism has `noise_multiplier`.

    Counts have a given noise; `split` divides the rest of the multiplier over the other parts. Parts marked `alone` do
    not divide it: each has the full multiplier. With noise_multiplier=0, for debugging, no part has noise.

    Parts with a share a have the joint multiplier z / sqrt(a), and the others z / sqrt(1 - a), since
    a / z^2 + (1 - a) / z^2 = 1 / z^2.
    """
    z = noise_multiplier
    stds = {b: b.count_noise * expected_size if z > 0 else 0.0 for b in bounds if b.count_noise is not None}
    if stds and z > 0:
        z = _multiplier_left(stds, z, expected_size)
    main = [b for b in bounds if b.count_noise is None and b.share is None]
    beside = [b for b in bounds if b.share is not None]
    share = max((b.share or 0.0 for b in beside), default=0.0)
    stds |= _divided(main, parameters, z / math.sqrt(1 - share), split)
    if beside:
        stds |= _divided(beside, parameters, z / math.sqrt(share), split if isinstance(split, str) else "optimal")
    parts = tuple(Part(b.name, b.parameters, b.sensitivity, stds[b], b.scales, b.alone) for b in bounds)
    if effective_multiplier(parts) < noise_multiplier:
        # Bounds may change from step to step, and rounding must not reduce the multiplier below that of the event.
        return tuple(replace(p, noise_std=p.noise_std * (1 + 2.0**-40)) for p in parts)
    return parts


def _divided(
    bounds: Sequence[Bound], parameters: Parameters, noise_multiplier: float, split: Split
) -> dict[Bound, float]:
    """The noise of each part, such that the joint mechanism has the multiplier.

    By weights, s_k = z S_k sqrt(sum_j p_j^2) / p_k: a part with a larger weight p gets less noise.
    """
    z = noise_multiplier
    if any(b.alone for b in bounds):
        if not isinstance(split, str):
            raise ConfigurationError(
                "split: weights are not supported with RandomLayer, where each part has the full noise multiplier: "
                "omit split."
            )
        found = [z * b.sensitivity for b in bounds]
    elif isinstance(split, str):
        sizes = [sum(dimension(parameters[n]) for n in b.parameters) if b.size is None else b.size for b in bounds]
        found = split_noise([b.sensitivity for b in bounds], sizes, z, split)
    else:
        require_split(split)
        names = [b.name for b in bounds]
        numbers = [w for w in split.values() if isinstance(w, (int, float)) and math.isfinite(w) and w > 0]
        if sorted(split) != sorted(names) or len(numbers) < len(names):
            raise ConfigurationError(
                f"split: give a positive number for each of the parts {', '.join(map(repr, names))}, and for no other."
            )
        found = [z * b.sensitivity * math.hypot(*split.values()) / split[b.name] for b in bounds]
    return dict(zip(bounds, found, strict=True))


def _multiplier_left(counts: Mapping[Bound, float], noise_multiplier: float, expected_size: float) -> float:
    """z' = z / sqrt(1 - u), with u = sum_j (z S_j / s_j)^2 the share of the counts.

    The same as z'^-2 + sum_j (S_j / s_j)^2 = z^-2.
    """
    # Bounds change from step to step, and rounding must not reduce the multiplier below that of the event.
    z = noise_multiplier * (1 + 2.0**-30)
    used = math.hypot(*(z * b.sensitivity / std for b, std in counts.items()))  # sqrt(u)
    if used >= 1:
        enough = 2 * used * max(counts.values()) / expected_size
        raise ConfigurationError(
            f"count_noise is too small: at an expected batch size of {expected_size:g} the {len(counts)} counts alone "
            f"use up noise_multiplier={noise_multiplier:.4g}, and leave nothing for the gradient. Use "
            f"count_noise={enough:.2g} or more, larger batches, or fewer parts."
        )
    return z / math.sqrt(1 - used * used)
