"""Common base classes of `PerExample` and `Batch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import Clipper, Site, Split, StatementText, Strategy, damaged, require_split
from clipwise.clipping.contrib.sparse import Sparse, Thinned
from clipwise.clipping.noised_statistics import LayerStatistics, NoisedStatistics
from clipwise.clipping.public import PublicData
from clipwise.clipping.thresholds import (
    Constants,
    Groups,
    MaxNorm,
    NormRule,
    Policy,
    constants_for,
    described_groups,
    require_max_norm,
)
from clipwise.errors import ConfigurationError
from clipwise.gradients import Memory
from clipwise.gradients.precision import PutAside
from clipwise.privacy import Unit

_MOST = 2**31  # entries per tensor supported by torch._foreach_norm
_CHANGING = " (of the next step: bounds change by a public rule, and the noise is scaled with them)"
_STATISTICS = "noised statistics of batch norm layers, which they use in evaluation"


class VectorClipping(Strategy):
    """A strategy that clips the vectors of examples or of microbatches. Its subclasses are dataclasses."""

    max_norm: MaxNorm
    parts: Groups | Policy
    split: Split
    sparse: Sparse | None
    running_statistics: NoisedStatistics | None

    def require_settings(self) -> None:
        """Raise if an argument is invalid."""
        if not isinstance(self.max_norm, NormRule):
            require_max_norm(self.max_norm)
        require_split(self.split)
        for name, kind in (("sparse", Sparse), ("running_statistics", NoisedStatistics)):
            given = getattr(self, name)
            if not (given is None or isinstance(given, kind)):
                raise ConfigurationError(f"{name} must be {kind.__name__}(...) or None, not {type(given).__name__}.")

    def constants(self, site: Site) -> Constants:
        constants = constants_for(self.max_norm, self.parts, site)
        return constants if self.sparse is None else Thinned(self.sparse, constants, site)

    @property
    def takes_complex(self) -> bool:  # type: ignore[override]
        """`Sparse` supports real parameters only."""
        return self.sparse is None

    @property
    def needs_whole_weights(self) -> str:  # type: ignore[override]
        """The option that prevents sharding."""
        options = {
            "sparse=Sparse(...)": self.sparse is not None,
            "running_statistics=NoisedStatistics(...)": self.running_statistics is not None,
            "local_update": self.has_local_update,
            f"parts={type(self.parts).__name__}(...) with public data": bool(self.public_data()),
        }
        return next((name for name, is_used in options.items() if is_used), "")

    def public_data(self) -> tuple[PublicData, ...]:
        return self.parts.public_data() if isinstance(self.parts, Policy) else ()

    def described(self) -> dict[str, Any]:
        """The common part of `describe`."""
        norm, parts = self.max_norm, self.parts
        if isinstance(norm, NormRule):
            norm = norm.describe()
        if isinstance(parts, Policy):
            parts = parts.describe()
        elif not isinstance(parts, str):
            parts = repr(described_groups(parts))
        options = {"sparse": self.sparse, "running_statistics": self.running_statistics}
        return {
            "strategy": self.name,
            "max_norm": dict(norm) if isinstance(norm, Mapping) else norm,
            "parts": parts,
            "split": self.split if isinstance(self.split, str) else dict(self.split),
            **{name: rule.describe() for name, rule in options.items() if rule is not None},
        }

    @classmethod
    def statement_text(cls, recorded: Mapping[str, Any], unit: Unit) -> StatementText:
        norm, parts = recorded.get("max_norm"), recorded.get("parts")
        policy = parts if isinstance(parts, Mapping) else {}
        decays = isinstance(norm, Mapping) and norm.get("rule") == "decay"
        changes = policy.get("every") is not None or decays or "sparse" in recorded
        source = policy.get("norms from", {})
        count = next((f"{source[kind]} {kind}" for kind in ("examples", "batches") if kind in source), "")
        return replace(
            super().statement_text(recorded, unit),
            changing=_CHANGING if changes else "",
            released=_STATISTICS if "running_statistics" in recorded else "",
            public_data=f"{source['public']} ({count}), for typical gradient norms" if "public" in source else "",
        )


class VectorClipper(Clipper):
    """A clipper whose sensitivity of part k is `factor` C_k, for an expected number of clipped `vectors` per step."""

    _memory: Memory

    def __init__(self, constants: Constants, factor: float, vectors: float, statistics: LayerStatistics) -> None:
        self._constants, self._factor, self._statistics = constants, factor, statistics
        self.divisor = vectors * constants.share
        self.lasts, self.draws = constants.lasts, constants.alone
        self.adapts = type(constants).learn is not Constants.learn or bool(statistics.bounds)
        self._restate()

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        return self._constants.frozen

    def settle(self) -> None:
        self._constants.settle()

    @contextmanager
    def putting_aside(self) -> Iterator[PutAside]:
        before, aside = self._memory.rare, PutAside()
        self._memory.rare = aside
        try:
            yield aside
        finally:
            self._memory.rare = before

    def learn(self, means: Mapping[str, Tensor]) -> bool:
        # With a share below 1 each part has only some of the vectors; statistics use all of them.
        self._statistics.learn({b.name: means[b.name] * self._constants.share for b in self._statistics.bounds})
        return self._constants.learn(means, self.noise) and self._restate()

    def clips(self) -> object:
        constants = self._constants
        groups = {part: tuple(names) for part, names in constants.groups.items()}
        return groups, dict(constants.norms), dict(constants.scales)

    def state_dict(self) -> dict[str, Any]:
        return self._constants.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        try:
            return self._constants.load_state_dict(state) and self._restate()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged("the state of its clipping is missing or invalid") from error

    def _restate(self) -> bool:
        """Recompute the bounds from the constants. Returns True: they changed."""
        self.bounds = (*self._constants.bounds_with(self._factor), *self._statistics.bounds)
        return True


def tensor_lengths(tensors: Sequence[Tensor]) -> list[Tensor]:
    """|t| of each tensor in float64, in one call for all but empty and huge ones."""
    ordinary = [0 < t.numel() < _MOST for t in tensors]
    together = [t for t, is_ordinary in zip(tensors, ordinary, strict=True) if is_ordinary]
    found = iter(torch._foreach_norm(together, 2, dtype=torch.float64) if together else ())
    return [
        next(found) if is_ordinary else torch.linalg.vector_norm(t, dtype=torch.float64)
        for t, is_ordinary in zip(tensors, ordinary, strict=True)
    ]
