"""Division of the noise of a step over its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clipwise.clipping.base import Bound, Parameters, Split
from clipwise.errors import ConfigurationError
from clipwise.gradients.real_views import dimension
from clipwise.privacy import Part, effective_multiplier, split_noise


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
        stds |= _divided(beside, parameters, z / math.sqrt(share), split if isinstance(split, str) else "optimal")
    parts = tuple(Part(b.name, b.parameters, b.sensitivity, stds[b], b.scales, b.alone) for b in bounds)
    if effective_multiplier(parts) < noise_multiplier:
        # Bounds may change from step to step, and rounding must not reduce the multiplier below that of the event.
        return tuple(replace(p, noise_std=p.noise_std * (1 + 2.0**-40)) for p in parts)
    return parts


def _divided(
    bounds: Sequence[Bound], parameters: Parameters, noise_multiplier: float, split: Split
) -> dict[Bound, float]:
    """The noise of each part, such that the joint mechanism has the multiplier."""
    z = noise_multiplier
    if any(b.alone for b in bounds):
        assert all(b.alone for b in bounds)
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
        found = _by_weights(bounds, z, split)
    return dict(zip(bounds, found, strict=True))


def _by_weights(bounds: Sequence[Bound], noise_multiplier: float, weights: Mapping[str, float]) -> list[float]:
    """s_k = z S_k sqrt(sum_j p_j^2) / p_k: a part with a larger weight p gets less noise."""
    require_split(weights)
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
