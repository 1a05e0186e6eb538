"""Parts of the parameters, the policies that choose them, and their clipping norms C_k, constant or adaptive."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipwise.clipping.base import Bound, Site
from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number, with_plain_numbers

if TYPE_CHECKING:
    from clipwise.clipping.public import PublicData

Groups = str | Sequence[Collection[str]] | Mapping[str, Collection[str]]


class Policy(ABC):
    """A rule that groups parameters and chooses their constants; passed as `parts` of a strategy."""

    @abstractmethod
    def constants(self, max_norm: float, site: Site) -> Constants:
        """The constants for one model. Raises if the rule does not support it."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The rule in JSON types, with the public data that it uses."""

    def public_data(self) -> tuple[PublicData, ...]:
        """The public data that the rule uses."""
        return ()


def group_parameters(
    parts: Groups, parameters: Mapping[str, torch.nn.Parameter], argument: str = "parts"
) -> dict[str, list[str]]:
    """Part name -> parameter names. Every parameter is in exactly one part. Errors name `argument`.

    "all": one part; "layer": one part per module (weight and bias together); "tensor": one part per parameter; or a
    list or mapping of lists of parameter names, or of module names for all parameters below them.
    """
    if isinstance(parts, str):
        if parts == "all":
            return {"all": list(parameters)}
        if parts == "tensor":
            return {name: [name] for name in parameters}
        if parts == "layer":
            layers: dict[str, list[str]] = {}
            for name in parameters:
                layers.setdefault(_layer_of(name), []).append(name)
            own = "model" if "model" not in layers else "(model)"  # for parameters of the root module
            return {layer or own: names for layer, names in layers.items()}
        raise ConfigurationError(
            f"{argument}={parts!r} is not known: use 'all', 'layer', 'tensor' or lists of parameter names."
        )
    grouped: dict[str, list[str]] = {}
    for part, names in _named(parts, argument).items():
        if not names:
            raise ConfigurationError(f"{argument}: {part!r} has no parameters; remove it.")
        grouped[part] = []
        for wanted in _in_order(names):
            found = [name for name in parameters if name == wanted or name.startswith(wanted + ".")]
            if not found:
                raise ConfigurationError(f"{argument}: {wanted!r} is not a trainable parameter or module of the model.")
            grouped[part] += found
    seen = [name for names in grouped.values() for name in names]
    for name in parameters:
        if seen.count(name) != 1:
            times = "in no part" if name not in seen else "in several parts"
            raise ConfigurationError(f"{argument}: trainable parameter {name!r} is {times}; it must be in exactly one.")
    return grouped


def _layer_of(name: str) -> str:
    """The module of a parameter; for an original of a parametrized weight, the module of the weight."""
    path = name.split(".")
    return ".".join(path[: path.index("parametrizations")] if "parametrizations" in path else path[:-1])


def _named(given: object, argument: str) -> Mapping[str, Collection[str]]:
    """Part name -> names. Raises if `given` does not consist of lists of names."""
    parts = {f"group {i}": names for i, names in enumerate(given)} if isinstance(given, (list, tuple)) else given
    if isinstance(parts, Mapping) and all(
        isinstance(names, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in names)
        for names in parts.values()
    ):
        return parts
    raise ConfigurationError(
        f"{argument}={given!r} is not known: use 'all', 'layer', 'tensor', or a list of lists of parameter names, "
        "such as [['0.weight'], ['2.weight', '2.bias']]."
    )


def described_groups(groups: Groups) -> Any:
    """The groups as given, in JSON types."""
    if isinstance(groups, str):
        return groups
    if isinstance(groups, Mapping):
        return {part: _in_order(names) for part, names in groups.items()}
    return [_in_order(names) for names in groups]


def _in_order(names: Collection[str]) -> list[str]:
    """The names in a reproducible order: the order of a set differs between processes."""
    return sorted(names) if isinstance(names, (set, frozenset)) else list(names)


def norms_of_parts(max_norm: float | Mapping[str, float], parts: Sequence[str]) -> dict[str, float]:
    """C_k of each part: as given, or C / sqrt(K), so that the whole gradient has norm at most C."""
    if isinstance(max_norm, Mapping):
        missing = [part for part in parts if part not in max_norm]
        if missing or len(max_norm) != len(parts):
            raise ConfigurationError(f"max_norm: give one number for each of the parts {', '.join(map(repr, parts))}.")
        return {part: max_norm[part] for part in parts}
    return dict.fromkeys(parts, max_norm / math.sqrt(len(parts)))


_LEAST_NORM, _MOST_NORM = 1e-30, 1e30  # outside, clipped gradients and noise underflow or overflow in float32


class Constants:
    """The constants of each part: the clipping norm C_k and the scales of its parameters. Here they never change."""

    lasts: float = math.inf  # the fewest releases between changes of groups, norms or scales by `learn`
    alone: bool = False  # whether each vector contributes to one random part only; see privacy.Part
    share: float = 1.0  # the expected fraction of the vectors in each part, a factor of the divisor

    def __init__(
        self, groups: dict[str, list[str]], norms: dict[str, float], scales: Mapping[str, float] | None = None
    ) -> None:
        self.groups = groups  # the parameters of each part
        self.norms = norms  # C_k, the clipping norm of each part, after scaling
        self.scales = dict(scales or {})  # m, the factor of each parameter's gradient before clipping; 1 if missing
        self.bounds: tuple[Bound, ...] = ()  # the parts released besides the gradient
        self.frozen: dict[str, Tensor] = {}  # entries set to 0 before clipping, by parameter (bool, of its shape)

    def bounds_with(self, factor: float) -> tuple[Bound, ...]:
        """The bounds of a step, with sensitivity `factor` times C_k."""
        parts = []
        for part, names in self.groups.items():
            scales = tuple(self.scales.get(name, 1.0) for name in names) if self.scales else ()
            parts.append(Bound(part, tuple(names), factor * self.norms[part], scales=scales, alone=self.alone))
        return (*parts, *self.bounds)

    def chosen(self, secret: bytes, vectors: int) -> dict[str, Tensor]:
        """The vectors in each part (bool [vectors]); empty if every vector is in all parts."""
        return {}

    def counts(self, norms: Mapping[str, Tensor], muted_B: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """The sums released besides the gradient, from the norms [B] of each part."""
        return {}

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """Adapt to a release: the noised sums over the divisor. Returns whether anything changed.

        `noise` is the standard deviation of the noise on each coordinate; see `Clipper.noise`.
        """
        return False

    def settle(self) -> None:
        """Restore frozen entries of the parameters."""

    def state_dict(self) -> dict[str, Any]:
        """The learned state in JSON types. It is public."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a `state_dict`; any exception if it is invalid. Returns whether anything changed."""
        return False


class ScaledConstants(Constants):
    """Other constants with norms multiplied by a varying factor."""

    def __init__(self, inner: Constants) -> None:
        super().__init__(inner.groups, inner.norms, inner.scales)
        self._inner, self.bounds = inner, inner.bounds
        self.alone, self.share = inner.alone, inner.share

    def factor(self, names: Sequence[str]) -> float:
        """The factor for the norm of a part with these parameters."""
        raise NotImplementedError

    def chosen(self, secret: bytes, vectors: int) -> dict[str, Tensor]:
        return self._inner.chosen(secret, vectors)

    def counts(self, norms: Mapping[str, Tensor], muted_B: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        return self._inner.counts(norms, muted_B, real_B)

    def _take_over(self) -> bool:
        self.groups, self.scales = self._inner.groups, dict(self._inner.scales)
        self.norms = {part: C * self.factor(self.groups[part]) for part, C in self._inner.norms.items()}
        return True


class NormRule(ABC):
    """A `max_norm` that changes during training."""

    @abstractmethod
    def constants(self, parts: Groups | Policy, site: Site) -> Constants:
        """The constants for one model. Raises if the rule does not support it."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The rule in JSON types, for fingerprints and statements."""


MaxNorm = float | Mapping[str, float] | NormRule


def require_max_norm(max_norm: object) -> None:
    """Raise if `max_norm` is neither a positive number nor a mapping of them."""
    for norm in max_norm.values() if isinstance(max_norm, Mapping) else [max_norm]:
        number("max_norm", norm, least=_LEAST_NORM, most=_MOST_NORM)


def constants_for(max_norm: MaxNorm, parts: Groups | Policy, site: Site) -> Constants:
    """The constants of each part of one model."""
    if isinstance(max_norm, NormRule):
        return max_norm.constants(parts, site)
    if isinstance(parts, Policy):
        if isinstance(max_norm, Mapping):
            raise _wrong_norm(parts)
        return parts.constants(max_norm, site)
    groups = group_parameters(parts, site.parameters)
    return Constants(groups, norms_of_parts(max_norm, list(groups)))


def _wrong_norm(policy: Policy) -> ConfigurationError:
    return ConfigurationError(
        f"max_norm must be a number with parts={type(policy).__name__}(...), which chooses the clipping norms."
    )


@dataclass(frozen=True)
class Quantile(NormRule):
    """A `max_norm` that adapts until a fraction `target` of the examples is not clipped.

    After each step, with f the released fraction of examples with a gradient norm below C (norms close to C count
    partially),

        C <- C exp(-learning_rate (f - target)),   kept within [minimum, maximum].

    Each of several parts has its own count and its own C_k, and `initial`, `minimum` and `maximum` are totals: C_k
    starts at initial / sqrt(K), and so on.

    Args:
        target: the fraction of examples that should not be clipped, above 0 and below 1.
        initial: C in the first step.
        learning_rate: the step size of log C.
        count_noise: the standard deviation of the noise on f; that on the count is s = count_noise L, with L the
            expected batch size. The counts use a part of the noise multiplier z of the step, and the gradient gets the
            larger multiplier

                z' = (z^-2 - K (S / s)^2)^(-1/2),   S = 1/2 under zero-out, 1 under replace-one.

            A `count_noise` that leaves nothing for the gradient raises an error.
        minimum, maximum: the range of C. Public, like all other arguments.

    Guarantee:
        - Release: sum_i (b_i - 1/2) + noise, b_i = clamp(3/2 - |g_i| / C, 0, 1), divided by L and never by the realised
          batch size. A gradient that is not finite counts as clipped.
        - Sensitivity: 1/2 under zero-out, 1 under replace-one.
        - b_i is a ramp from C/2 to 3C/2, not a step at C: rounding of norms may depend on the batch size, so with many
          equal norms a step function would let one example change all of their b_i.
    """

    target: float = 0.5
    initial: float = 1.0
    learning_rate: float = 0.2
    count_noise: float = 0.05
    minimum: float = 1e-6
    maximum: float = 1e6

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        for name, value in asdict(self).items():
            number(f"Quantile: {name}", value, above=0)
        number("Quantile: target", self.target, below=1)
        number("Quantile: minimum", self.minimum, least=_LEAST_NORM)
        number("Quantile: maximum", self.maximum, most=_MOST_NORM)
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigurationError(
                f"Quantile: initial={self.initial!r} must lie between minimum={self.minimum!r} and "
                f"maximum={self.maximum!r}: widen the range, or change initial."
            )

    def constants(self, parts: Groups | Policy, site: Site) -> Constants:
        if isinstance(parts, Policy):
            raise _wrong_norm(parts)
        return QuantileNorms(self, site, group_parameters(parts, site.parameters))

    def describe(self) -> dict[str, Any]:
        return {"rule": "quantile", **asdict(self)}


class QuantileNorms(Constants):
    """`Quantile` for the parts of one model."""

    lasts = 1

    def __init__(self, quantile: Quantile, site: Site, groups: dict[str, list[str]]) -> None:
        parts = list(groups)
        super().__init__(groups, norms_of_parts(quantile.initial, parts))
        self._quantile = quantile
        self._least = norms_of_parts(quantile.minimum, parts)
        self._most = norms_of_parts(quantile.maximum, parts)
        self._names = {part: f"count of {part}" for part in parts}
        # b - 1/2 lies in [-1/2, 1/2].
        self.bounds = tuple(Bound(name, (), site.factor / 2, quantile.count_noise) for name in self._names.values())

    def counts(self, norms: Mapping[str, Tensor], muted_B: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """sum_i (b_i - 1/2) of each part over the real examples, in float64."""
        counted_B = torch.ones_like(muted_B) if real_B is None else real_B
        found = {}
        for part, C in self.norms.items():
            b_B = (1.5 - norms[part].to(torch.float64) / C).clamp(0, 1).masked_fill(muted_B, 0)
            found[self._names[part]] = (b_B - 0.5).mul(counted_B).sum().reshape(1)
        return found

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """C <- C exp(-learning_rate (f - target)), in logarithms to avoid overflow."""
        rule = self._quantile
        for part, C in self.norms.items():
            fraction = float(means[self._names[part]]) + 0.5
            least, most = self._least[part], self._most[part]
            log_C = math.log(C) - rule.learning_rate * (fraction - rule.target)
            log_C = min(max(log_C, math.log(least)), math.log(most))
            self.norms[part] = min(max(math.exp(log_C), least), most)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"norms": dict(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        saved = state["norms"]
        self.norms = {k: number(k, saved[k], least=self._least[k], most=self._most[k]) for k in self.norms}
        return True
