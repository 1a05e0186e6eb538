"""The interface of a clipping strategy, and of the clipper that it makes for one model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from clipwise.errors import CheckpointError, ConfigurationError
from clipwise.gradients import Memory, per_example_gradients
from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.gradients.rare import PutAside
from clipwise.privacy import Adjacency, Part, Unit
from clipwise.sampling import Scheme

if TYPE_CHECKING:
    from clipwise.clipping.public import Public

Parameters = Mapping[str, torch.nn.Parameter]
Split = str | Mapping[str, float]  # how noise is divided: a policy, or a weight for each part
_SEPARATE = (
    "what is computed of a mini-set depends on that mini-set, on what was released and on fresh random numbers only: "
    "not proven (examples of a mini-set may depend on one another)"
)


@dataclass(frozen=True)
class Site:
    """What a strategy is bound to: a model, its trainable parameters, the sampling scheme and the unit of privacy."""

    model: nn.Module
    parameters: Parameters
    adjacency: Adjacency
    unit: Unit
    scheme: Scheme
    empty_batch: Callable[[], Any] | None = None  # makes a batch without records, of the shape of others

    @property
    def factor(self) -> float:
        """By how many bounded vectors one record moves their sum: a replaced one takes one out and puts another in."""
        return 2.0 if self.adjacency is Adjacency.REPLACE_ONE else 1.0


@dataclass(frozen=True)
class Bound:
    """One part of the sum and the most that one unit can move it, in L2.

    A part without parameters is a vector beside the gradient, such as a count, or statistics of a layer.
    A part with `count_noise` gets noise of that standard deviation times the expected batch size; the others
    share what the noise multiplier then leaves. `scales` and `alone` are those of `privacy.Part`. `size` is the number
    of entries released: of its parameters, if not all; of a vector without parameters, if more than one.
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
        divisor: the public constant that the noised sum is divided by: the expected number of clipped vectors.
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

    @abstractmethod
    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """The bounded sum over the examples of a batch, or of a piece of one.

        By parameter; a part without parameters has its own name. `real_B` marks the examples that count, where a batch
        was filled up to a constant size with others.
        """

    def sum_at_outputs(self, losses: Tensor, outputs: Tensor | None) -> dict[str, Tensor]:
        """`clipped_sum`, for a strategy that needs the model's outputs as well."""
        return self.clipped_sum(losses)

    def clipped_update(self, batch: Any) -> dict[str, Tensor]:
        """The bounded sum of a batch, for a strategy with a local update."""
        raise NotImplementedError

    def nothing(self) -> dict[str, Tensor]:
        """The bounded sum of an empty batch, or of an empty piece: zeros. It needs no losses."""
        return {name: torch.zeros_like(p) for name, p in self._parameters.items()}

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
        """Adapt to the weights as they are: after an update, or after any other change.

        They follow from releases. Returns whether `bounds` changed.
        """
        return False

    def on_limit(self) -> dict[str, bool]:
        """Whether the weights of each parameter are at the limit that they are clipped to, if there is one."""
        return {}

    @contextmanager
    def putting_aside(self) -> Iterator[PutAside]:
        """In this block nothing waits for the device: questions about rare events are collected, to be read later."""
        yield PutAside()

    def look_again(self) -> None:  # noqa: B027 (most strategies make all checks in every step)
        """The next ordinary step makes all of its checks: those before it were replayed."""

    def learn(self, means: Mapping[str, Tensor]) -> bool:
        """Adapt to what a step released, the gradient and what is beside it: noised, over the divisor.

        Returns whether `bounds` changed. Between two releases they stay.
        """
        return False

    def clips(self) -> object:
        """All that `clipped_sum` depends on and `learn` may change, to compare with what it was."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What was learned so far, in plain types. It follows from releases, and may be published."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go back to what a `state_dict` of the same strategy holds. Returns whether `bounds` changed."""
        return False


@dataclass(frozen=True)
class StatementText:
    """What a privacy statement says about a strategy.

    Args:
        sum: what a step releases with noise.
        released: what is released besides gradients and weights.
        separate: what is assumed in place of independent examples; "" if each loss must depend on its own example only.
        assumptions: what else the guarantee assumes.
        changing: a sentence after the sensitivities, if they are not the same in each step.
        public_data: which public data it uses, and what for.
    """

    sum: str = "the clipped sum"
    released: str = ""
    separate: str = ""
    assumptions: tuple[str, ...] = ()
    changing: str = ""
    public_data: str = ""


class Strategy(ABC):
    """A way to bound what one unit can do to the released sum. Only configuration: no model, no private data.

    Attributes:
        name: under which ledgers and checkpoints record it: the value of "strategy" in `describe`.
        unit: whose privacy it protects.
        split: how noise is divided over parts.
        is_coupled: whether the bound holds although examples of a batch depend on one another.
        bounds_inside: whether it bounds gradients inside the network, so that a loss must come from its outputs.
        takes_views: whether an example may have several rows in a batch.
        clips_whole_blocks: whether everything that a mini-set of records adds to the release is clipped as a whole.
            Only then can another block of a partition stand in for the one that holds a record. Batches are then handed
            out mini-set by mini-set.
        mini_sets: how many mini-sets a batch has, if it clips whole ones.
        protects_users: whether the unit may be a user, with all of its records as one mini-set.
        takes_complex: whether parameters may be complex. They count as pairs of real ones.
        has_local_update: whether it computes the update of a batch itself, by `Clipper.clipped_update`, and takes no
            losses.
        allows_batch_norm: whether `attach` itself refuses normalization layers that it cannot bound, or allows all.
    """

    name: ClassVar[str]
    unit: Unit = Unit.RECORD
    split: Split = "optimal"
    is_coupled: bool = False
    bounds_inside: bool = False
    takes_views: bool = True
    clips_whole_blocks: bool = False
    mini_sets: int = 1
    protects_users: bool = False
    takes_complex: bool = False
    has_local_update: bool = False
    allows_batch_norm: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in cls.__dict__:
            other = _RECORDED.setdefault(cls.name, cls)
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ConfigurationError(f"{cls.__name__}.name={cls.name!r} is the name of {other.__name__}.")
            _RECORDED[cls.name] = cls

    @abstractmethod
    def attach(self, site: Site) -> Clipper:
        """Bind to a model's trainable parameters, or refuse the combination."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The configuration in plain types, for fingerprints and statements, with the `name` as "strategy"."""

    @classmethod
    def statement_text(cls, recorded: Mapping[str, Any], unit: Unit) -> StatementText:
        """What a statement says about a run whose strategy recorded this by `describe`."""
        unknown: tuple[str, ...] = ()
        name = recorded.get("strategy")
        if name is not None and name not in _RECORDED:
            unknown = (
                f"the strategy {name!r} keeps the sensitivities that it stated; its code is not loaded here",
            )
        return StatementText(separate=_SEPARATE if cls.is_coupled else "", assumptions=unknown)

    def require_views(self) -> None:
        """Refuse examples of several rows where that is not possible."""
        if not self.takes_views:
            raise ConfigurationError(
                f"averaged_views does not go with {type(self).__name__}, which clips rows and not examples of several: "
                "leave it out, or use PerExample."
            )

    def require_losses(self, losses: Tensor, model: nn.Module, parameters: Parameters) -> None:
        """Refuse losses that a first step would refuse, for `clipwise.check`."""
        per_example_gradients(losses, parameters, Memory())

    def public_data(self) -> tuple[Public, ...]:
        """Public data that it uses."""
        return ()


_RECORDED: dict[str, type[Strategy]] = {}


def recorded_strategy(recorded: Any) -> type[Strategy]:
    """The class of a strategy from what its `describe` recorded; `Strategy` itself if that is not known."""
    name = recorded.get("strategy") if isinstance(recorded, Mapping) else None
    unknown: type[Strategy] = Strategy  # type: ignore[type-abstract]  # no instance is made
    return _RECORDED.get(name, unknown) if isinstance(name, str) else unknown


def require_entries(parameters: Parameters, strategy: str) -> None:
    """Refuse empty parameters, for a strategy that bounds whole layers."""
    for name, p in parameters.items():
        if p.numel() == 0:
            raise ConfigurationError(
                f"Parameter {name!r} has no entries, and {strategy} has no bound for a layer without any: take the "
                "layer out of the model."
            )


def require_records(unit: Unit, strategy: str) -> None:
    """Refuse another unit than the record, for a strategy that bounds what single records do."""
    if unit is not Unit.RECORD:
        raise ConfigurationError(f"{strategy} protects single records, not unit={str(unit)!r}.")


def damaged(what: str) -> CheckpointError:
    """The error for a `state_dict` that no run can have saved."""
    return CheckpointError(
        f"This state_dict of a private run is damaged: {what}. Use the one saved before it."
    )
