"""What `PerExample` and `Batch` share: both clip vectors at the thresholds of their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import Clipper, Site, Split, StatementText, Strategy
from clipwise.clipping.contrib.sparse import Sparse, Thinned
from clipwise.clipping.grouping import Groups, Policy, described_groups
from clipwise.clipping.noise_split import require_split
from clipwise.clipping.noised_statistics import LayerStatistics, NoisedStatistics
from clipwise.clipping.public import Public
from clipwise.clipping.thresholds import Constants, MaxNorm, NormRule, constants_for, require_max_norm
from clipwise.errors import ConfigurationError
from clipwise.privacy import Unit

_MOST = 2**31  # numbers in a tensor that torch's calls for many at once can count


class VectorClipping(Strategy):
    """A strategy that clips vectors at thresholds: those of examples, or of mini-sets. Its subclasses are dataclasses.

    Attributes:
        max_norm, parts: from which the thresholds follow.
        sparse: which entries are frozen.
        running_statistics: of layers, released beside the gradient.
    """

    max_norm: MaxNorm
    parts: Groups | Policy
    split: Split
    sparse: Sparse | None
    running_statistics: NoisedStatistics | None

    def require_settings(self) -> None:
        """Refuse what no run can have."""
        if not isinstance(self.max_norm, NormRule):
            require_max_norm(self.max_norm)
        require_split(self.split)
        for name, kind in (("sparse", Sparse), ("running_statistics", NoisedStatistics)):
            given = getattr(self, name)
            if not (given is None or isinstance(given, kind)):
                raise ConfigurationError(
                    f"{name} must be {kind.__name__}(...) or None, not {type(given).__name__}."
                )

    def constants(self, site: Site) -> Constants:
        """The constants of one model."""
        constants = constants_for(self.max_norm, self.parts, site)
        return constants if self.sparse is None else Thinned(self.sparse, constants, site)

    @property
    def takes_complex(self) -> bool:  # type: ignore[override]
        """Entries that `Sparse` freezes are real ones."""
        return self.sparse is None

    def public_data(self) -> tuple[Public, ...]:
        return self.parts.public_data() if isinstance(self.parts, Policy) else ()

    def described(self) -> dict[str, Any]:
        """What `describe` says of the settings that both strategies have."""
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
        text = super().statement_text(recorded, unit)
        if policy.get("every") is not None or decays or "sparse" in recorded:
            text = replace(
                text,
                changing=" (of the step that was next then: bounds change by a public rule, and the noise with them)",
            )
        if "running_statistics" in recorded:
            released = "noised statistics of batch norm layers, and so what they use in evaluation"
            text = replace(text, released=released)
        return replace(text, public_data=_used_for_norms(policy.get("norms from")))


def _used_for_norms(source: object) -> str:
    """Which public data gave typical norms, if any did."""
    if not (isinstance(source, Mapping) and "public" in source):
        return ""
    count = next((f"{source[kind]} {kind}" for kind in ("examples", "batches") if kind in source), "")
    return f"{source['public']} ({count}), for typical gradient norms"


class VectorClipper(Clipper):
    """A clipper whose bounds are its constants' norms times a factor, and change when those do.

    Args:
        constants: of the parts.
        factor: by how many times C_k a unit can move part k.
        vectors: how many clipped vectors a step is expected to have.
        statistics: of layers, which are released beside the gradient.
    """

    def __init__(
        self,
        constants: Constants,
        factor: float,
        vectors: float,
        statistics: LayerStatistics | None = None,
    ) -> None:
        self._constants, self._factor = constants, factor
        self._statistics = LayerStatistics() if statistics is None else statistics
        self.divisor = vectors * constants.share
        self.lasts, self.draws = constants.lasts, constants.alone
        self._restate()

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        return self._constants.frozen

    def settle(self) -> None:
        self._constants.settle()

    def learn(self, means: Mapping[str, Tensor]) -> bool:
        # A share below 1 is of parts that hold some of the vectors only; statistics are of all of them.
        self._statistics.learn(
            {b.name: means[b.name] * self._constants.share for b in self._statistics.bounds}
        )
        changed = self._constants.learn(means, self.noise)
        if changed:
            self._restate()
        return changed

    def clips(self) -> object:
        constants = self._constants
        groups = {part: tuple(names) for part, names in constants.groups.items()}
        return groups, dict(constants.norms), dict(constants.scales)

    def state_dict(self) -> dict[str, Any]:
        return self._constants.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        changed = self._constants.load_state_dict(state)
        if changed:
            self._restate()
        return changed

    def _restate(self) -> None:
        """Take over what follows from the constants."""
        self.bounds = (*self._constants.bounds_with(self._factor), *self._statistics.bounds)


def tensor_lengths(tensors: Sequence[Tensor]) -> list[Tensor]:
    """|t| of each in float64, in few passes over memory: one call for all but empty and huge ones."""
    ordinary = [0 < t.numel() < _MOST for t in tensors]
    together = [t for t, is_ordinary in zip(tensors, ordinary, strict=True) if is_ordinary]
    found = iter(torch._foreach_norm(together, 2, dtype=torch.float64) if together else ())
    return [
        next(found) if is_ordinary else torch.linalg.vector_norm(t, dtype=torch.float64)
        for t, is_ordinary in zip(tensors, ordinary, strict=True)
    ]
