"""Policies from typical norms: scale factors, clipping norms and groups of layers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor

from clipwise.clipping.base import Site
from clipwise.clipping.contrib.decay import Every, period_of, require_every
from clipwise.clipping.contrib.typical import OF, Estimated, PublicNorms, ReleasedNorms, Typical
from clipwise.clipping.public import PublicData, require_public
from clipwise.clipping.thresholds import Constants, Groups, Policy, described_groups, group_parameters
from clipwise.deprecation import renamed_fields
from clipwise.errors import ConfigurationError
from clipwise.gradients.real_views import dimension
from clipwise.validation.arguments import one_of, require_bool, whole, with_plain_numbers

NormSource = PublicData | ReleasedNorms


class NormPolicy(Policy):
    """A rule that computes constants from e_h, the typical norm of each layer h.

    `grouped_by` is the argument with the groups h; the other fields are those of `Adaptive`.
    """

    public: NormSource
    of: str
    every: Every
    microbatch_size: int | None
    grouped_by: ClassVar[str] = "groups"

    @abstractmethod
    def choice(self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site) -> Constants:
        """The constants for typical norms `e`. `layers` has the parameters of each h."""

    def constants(self, max_norm: float, site: Site) -> Constants:
        """The constants for one model, with norms measured at its current weights."""
        owner = f"{type(self).__name__}: {self.grouped_by}"
        layers = group_parameters(getattr(self, self.grouped_by), site.parameters, owner)
        typical: Typical
        if isinstance(self.public, ReleasedNorms):
            typical = Estimated(self.public, site.parameters, layers)
        else:
            typical = PublicNorms(self.public, site, layers, self.of, self.microbatch_size)
        return Following(typical, lambda e: self.choice(e, layers, max_norm, site), period_of(self.every, site))

    def public_data(self) -> tuple[PublicData, ...]:
        return (self.public,) if isinstance(self.public, PublicData) else ()

    def require_measurable(self) -> None:
        """Raise if the source or the settings give no norms; called first in `__post_init__`."""
        with_plain_numbers(self)
        owner, microbatch_size = type(self).__name__, self.microbatch_size
        require_every(self.every, owner)
        if not isinstance(self.public, ReleasedNorms):
            require_public(self.public, owner, instead="; without public data, pass ReleasedNorms()")
        elif self.every is None:
            raise ConfigurationError(
                f"{owner}: every=None measures once, at the start, before the first release: pass every='epoch' or a "
                "number of steps with ReleasedNorms()."
            )
        object.__setattr__(self, "of", one_of(f"{owner}: of", self.of, OF))
        if microbatch_size is not None:
            whole(f"{owner}: microbatch_size", microbatch_size, least=1)
            if self.of != "microbatch":
                raise ConfigurationError(f"{owner}: microbatch_size requires of='microbatch'.")

    def require_lengths(self, why: str) -> None:
        """Raise if the source is `ReleasedNorms`, which gives only ratios of norms."""
        if isinstance(self.public, ReleasedNorms):
            raise ConfigurationError(
                f"{type(self).__name__}: {why} requires norms, and ReleasedNorms() estimates ratios: pass public data."
            )

    def described(self) -> dict[str, Any]:
        """The source of e_h, in JSON types."""
        return {
            "norms from": self.public.describe(),
            "of": self.of,
            "microbatch_size": self.microbatch_size,
            "every": self.every,
            self.grouped_by: described_groups(getattr(self, self.grouped_by)),
        }


class Following(Constants):
    """Constants from a rule and from typical norms."""

    def __init__(
        self, typical: Typical, choose: Callable[[Mapping[str, float]], Constants], period: int | None
    ) -> None:
        super().__init__({}, {})
        self._typical, self._choose, self._releases = typical, choose, 0
        self.lasts = math.inf if period is None else period
        self._take_over()

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """At the end of a period, measure and choose again, at the weights before this update."""
        self._releases += 1
        self._typical.observe(means, noise or {})
        is_due = self._releases % self.lasts == 0  # never without a period: n % inf is n
        return is_due and self._typical.renew() and self._take_over()

    def _take_over(self) -> bool:
        choice = self._choose(self._typical.norms)
        self.groups, self.norms, self.scales = choice.groups, choice.norms, choice.scales
        return True

    def state_dict(self) -> dict[str, Any]:
        """The typical norms, which determine all constants, and the number of releases."""
        return {"releases": self._releases, **self._typical.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        releases = whole("releases", state["releases"])
        self._typical.load_state_dict(state)
        self._releases = releases
        return self._take_over()


MULTIPLIER_KINDS = ("optimal", "paper")


@renamed_fields(mini_set_size="microbatch_size")
@dataclass(frozen=True)
class Multipliers(NormPolicy):
    """The gradient of layer h is multiplied by m_h, the whole is clipped at C, and noise is added; then layer h is
    divided by m_h. So the noise on a coordinate of layer h is s / m_h.

        paper:    m_h = max_j e_j / e_h, which gives all layers equal typical norms
        optimal:  m_h = (sqrt(d_h) / e_h)^(1/2)

    For typical norms e_h and d_h coordinates the squared noise is (sum_h m_h^2 e_h^2) (sum_h d_h / m_h^2) times a
    constant, if C is proportional to the norm of the scaled typical gradient. By Cauchy-Schwarz this is at least
    (sum_h e_h sqrt(d_h))^2, which "optimal" attains. There is no factor sqrt(number of layers): there is one part.

    `max_norm` is the clipping norm of the *scaled* gradient, with typical norm |m e| = sqrt(sum_h m_h^2 e_h^2).
    `relative` and `keep_length` avoid tuning it from scratch.

    Args:
        public, of, every, microbatch_size: as in `Adaptive`.
        kind: "optimal" or "paper".
        groups: the groups with separate m_h: "layer", "tensor", or lists of names.
        relative: `max_norm` is relative to the typical norm: C = max_norm |m e|. Not with `ReleasedNorms()`.
        keep_length: multiply all m_h by one number, such that |m e| = |e|. `max_norm` then has the same meaning as in
            flat clipping: a typical gradient is clipped if |e| > max_norm. "optimal" with `ReleasedNorms()` always
            does this.

    Guarantee:
        - That of flat clipping: the *scaled* sum has sensitivity C or 2 C. Division by m_h is post-processing.
        - The m_h of a step are computed before it, from public data and released weights, or from releases only.
        - Assumption: data marked as public is public.
    """

    public: NormSource
    kind: str = "optimal"
    of: str = "example"
    every: Every = "epoch"
    groups: Groups = "layer"
    microbatch_size: int | None = None
    relative: bool = False
    keep_length: bool = False

    def __post_init__(self) -> None:
        self.require_measurable()
        one_of("Multipliers: kind", self.kind, MULTIPLIER_KINDS)
        for name in ("relative", "keep_length"):
            require_bool(f"Multipliers: {name}", getattr(self, name))
        if self.relative:
            self.require_lengths("relative=True")

    def choice(self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site) -> Constants:
        """One part with scales m_h."""
        sizes = {h: sum(dimension(site.parameters[n]) for n in names) for h, names in layers.items()}
        m = multipliers(e, sizes, self.kind, self._keeps_length())
        C = max_norm * (_length(m, e) if self.relative else 1.0)
        by_name = {n: m[h] for h, names in layers.items() for n in names}
        return Constants({"all": list(site.parameters)}, {"all": C}, {n: by_name[n] for n in site.parameters})

    def describe(self) -> dict[str, Any]:
        lengths = {"relative": self.relative, "keep_length": self._keeps_length()}
        return {"rule": "multipliers", "kind": self.kind, **self.described(), **lengths}

    def _keeps_length(self) -> bool:
        """If norms are known up to a factor, so is (sqrt(d_h) / e_h)^(1/2)."""
        return self.keep_length or (self.kind == "optimal" and isinstance(self.public, ReleasedNorms))


def multipliers(
    norms: Mapping[str, float], sizes: Mapping[str, int], kind: str, keep_length: bool = False
) -> dict[str, float]:
    """m_h of each layer; with `keep_length` such that sum_h m_h^2 e_h^2 = sum_h e_h^2."""
    if kind == "paper":
        m = {h: max(norms.values()) / e for h, e in norms.items()}
    else:
        m = {h: (math.sqrt(max(sizes[h], 1)) / e) ** 0.5 for h, e in norms.items()}
    if not keep_length:
        return m
    whole = math.hypot(*norms.values()) / _length(m, norms)
    return {h: m_h * whole for h, m_h in m.items()}


def _length(m: Mapping[str, float], e: Mapping[str, float]) -> float:
    """|m e|, the norm of the scaled typical gradient."""
    return math.hypot(*(m[h] * e[h] for h in e))


ADAPTIVE_KINDS = ("enhanced", "zhang")


@renamed_fields(mini_set_size="microbatch_size")
@dataclass(frozen=True)
class Adaptive(NormPolicy):
    """Adaptive layerwise clipping: part h is clipped to C_h, which is proportional to its typical norm e_h.

        enhanced:  C_h = C e_h / max_j e_j,   C = max_norm, the bound of the part with the largest norm
        zhang:     C_h = max_norm e_h;        with max_norm = 1 the rule as published

    An e_h below a thousandth of the largest is raised to that value, so that no C_h is 0.

    Args:
        public: `PublicData` on which e_h is measured, or `ReleasedNorms()` (with "enhanced" only).
        kind: "enhanced" or "zhang".
        of: "example": e_h is the mean norm of an example's gradient; "microbatch": of the mean gradient of a
            microbatch, for `Batch`.
        every: "epoch" or a number of steps after which e_h is measured again at the current weights; None measures
            once, at the start.
        groups: the parts: "layer", "tensor", or lists of names, as for `parts` itself.
        microbatch_size: the number of examples per microbatch; by default the batch size of the public data.

    Guarantee:
        - That of the strategy, with sensitivity C_h or 2 C_h of part h. All parts are one Gaussian mechanism.
        - The C_h of a step are computed before it, from public data and released weights, or from releases only.
        - Assumption: data marked as public is public.
    """

    public: NormSource
    kind: str = "enhanced"
    of: str = "example"
    every: Every = "epoch"
    groups: Groups = "layer"
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        self.require_measurable()
        one_of("Adaptive: kind", self.kind, ADAPTIVE_KINDS)
        if self.kind == "zhang":
            self.require_lengths("kind='zhang'")

    def choice(self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site) -> Constants:
        """C_h for the typical norms of the parts."""
        unit = max(e.values()) if self.kind == "enhanced" else 1.0
        return Constants(dict(layers), {h: max_norm * (e[h] / unit) for h in layers})

    def describe(self) -> dict[str, Any]:
        return {"rule": "adaptive", "kind": self.kind, **self.described()}


@renamed_fields(mini_set_size="microbatch_size")
@dataclass(frozen=True)
class ByNorm(NormPolicy):
    """Groups of layers with similar typical norms, the smallest first.

    The layers, sorted by e_h, are cut into `groups` runs that minimize the variation of log e_h within them (least
    squares, solved exactly). With E_k^2 = sum of e_h^2 over group k, its bound is

        C_k = C E_k / sqrt(sum_j E_j^2),   C = max_norm, the total: sum_k C_k^2 = C^2

    Args:
        public, of, every, microbatch_size: as in `Adaptive`, but by default layers are grouped once, at the start.
        groups: the number of groups; at most the number of layers is used.
        among: what is grouped: "layer", "tensor", or lists of names.

    Guarantee:
        - That of the strategy, with sensitivity C_k or 2 C_k of group k.
        - Groups and bounds of a step are computed before it, from public data and released weights, or from releases.
        - Assumption: data marked as public is public.
    """

    public: NormSource
    groups: int = 4
    among: Groups = "layer"
    grouped_by: ClassVar[str] = "among"
    of: str = "example"
    every: Every = None
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        self.require_measurable()
        whole("ByNorm: groups (`among` selects what is grouped)", self.groups, least=1)

    def choice(self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site) -> Constants:
        """The groups and their C_k."""
        ordered = sorted(layers, key=lambda h: e[h])  # stable: layers of one norm stay in the model's order
        cuts = best_cuts([math.log(e[h]) for h in ordered], self.groups)
        runs = [ordered[a:b] for a, b in pairwise(cuts)]
        lengths = [math.hypot(*(e[h] for h in run)) for run in runs]
        total = math.hypot(*lengths)
        groups = {f"group {k}": [n for h in run for n in layers[h]] for k, run in enumerate(runs)}
        norms = [max_norm * (length / total) for length in lengths]
        return Constants(groups, dict(zip(groups, norms, strict=True)))

    def describe(self) -> dict[str, Any]:
        return {"rule": "by norm", "groups": self.groups, **self.described()}


def best_cuts(values: Sequence[float], runs: int) -> list[int]:
    """0 = c_0 < c_1 < ... < c_K = n: the runs of sorted values with the least squared deviations from their means.

    least[b] is the least sum over values[:b] for a given number of runs; for one more run,
    least'[b] = min over a of least[a] + deviations(a, b).
    """
    n = len(values)

    def deviations(a: int, b: int) -> float:
        mean = math.fsum(values[a:b]) / (b - a)
        return math.fsum((v - mean) ** 2 for v in values[a:b])

    cost = {(a, b): deviations(a, b) for b in range(1, n + 1) for a in range(b)}
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(min(runs, n)):
        best = {
            b: min((least + cost[a, b], [*cuts, b]) for a, (least, cuts) in best.items() if a < b)
            for b in range(1, n + 1)
            if any(a < b for a in best)
        }
    return best[n][1]
