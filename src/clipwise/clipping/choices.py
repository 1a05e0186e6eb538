"""`max_norm` and `parts` as a strategy is given them: checked, described, and made into constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clipwise.clipping.base import Site
from clipwise.clipping.constants import Constants
from clipwise.clipping.contrib.decay import Decay, Decaying
from clipwise.clipping.grouping import Groups, Policy, described_groups, group_parameters, norms_of_parts
from clipwise.clipping.quantile import Quantile, QuantileNorms
from clipwise.errors import ConfigurationError

# In float32 a smaller bound would round clipped gradients and noise to a grid, and a larger one to infinity.
_LEAST_NORM, _MOST_NORM = 1e-30, 1e30

MaxNorm = float | Mapping[str, float] | Quantile | Decay


def require_max_norm(max_norm: MaxNorm) -> None:
    """Refuse a bound that is no positive number."""
    if isinstance(max_norm, Quantile):
        return  # it has checked itself
    if isinstance(max_norm, Decay):
        if isinstance(max_norm.max_norm, (Quantile, Decay)):
            raise ConfigurationError(
                "Decay: max_norm must be a number, or one for each part: a bound that adapts does not decay as well."
            )
        max_norm = max_norm.max_norm
    norms: Iterable[Any] = max_norm.values() if isinstance(max_norm, Mapping) else [max_norm]
    for norm in norms:
        number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        if not (number and _LEAST_NORM <= norm <= _MOST_NORM):
            raise ConfigurationError(
                f"max_norm must be a positive, finite number (from {_LEAST_NORM:g} to {_MOST_NORM:g}), not {norm!r}."
            )


def require_split(split: object) -> None:
    """Refuse what is neither a known way to divide the noise nor a weight for each part."""
    if not (isinstance(split, Mapping) or (isinstance(split, str) and split in ("optimal", "equal"))):
        raise ConfigurationError(
            f"split={split!r} is not known: use one of 'optimal', 'equal', or give a positive weight for each part."
        )


def constants_for(max_norm: MaxNorm, parts: Groups | Policy, site: Site) -> Constants:
    """The constants of each part of one model."""
    if isinstance(max_norm, Decay):
        return Decaying(max_norm, constants_for(max_norm.max_norm, parts, site), site)
    if isinstance(parts, Policy):
        if not isinstance(max_norm, (int, float)):
            raise ConfigurationError(
                f"max_norm must be a number with parts={type(parts).__name__}(...), which chooses the bounds."
            )
        return parts.constants(max_norm, site)
    groups = group_parameters(parts, site.parameters)
    if isinstance(max_norm, Quantile):
        return QuantileNorms(max_norm, groups, site.parameters, site.adjacency)
    return Constants(groups, norms_of_parts(max_norm, list(groups)))


def described_norm(max_norm: MaxNorm) -> Any:
    """In plain types."""
    if isinstance(max_norm, (Quantile, Decay)):
        return max_norm.describe()
    return dict(max_norm) if isinstance(max_norm, Mapping) else max_norm


def described_parts(parts: Groups | Policy) -> Any:
    """In plain types."""
    if isinstance(parts, Policy):
        return parts.describe()
    return parts if isinstance(parts, str) else repr(described_groups(parts))
