"""Bounds of clipwise layers: clipped inputs, bounded normalization."""

from __future__ import annotations

import math

from clipwise.layers.bounded import BoundedGroupNorm
from clipwise.lipschitz.rule import Call, PlainRule, Reach, Rule


def clip_input_rule(call: Call) -> Rule:
    """|y| <= C for any input; a projection onto a ball has slope at most 1."""
    reach = Reach.of(call.out, norm=call.target.max_norm * (1 + call.rounding.of_elements))
    return PlainRule(lambda x: reach, 1 + call.rounding.of_sum(math.prod(call.out)))


def bounded_norm_rule(call: Call) -> Rule:
    """(x - mu) / max(alpha, sigma) over groups of m entries.

    The Jacobian is a projection over max(alpha, sigma): |J| <= 1 / alpha. |y| <= min(sqrt(n), |x| / alpha). An entry is
    at most sqrt(m - 1), if it alone differs from the others.
    """
    module, alpha = call.target, float(call.target.alpha)
    if not (math.isfinite(alpha) and alpha > 0):  # the attribute may have been set
        raise call.refusal(f"alpha={module.alpha} gives no bound: set a positive, finite number")
    is_grouped = isinstance(module, BoundedGroupNorm)
    group = math.prod(call.out) // module.num_groups if is_grouped else math.prod(module.normalized_shape)
    error = call.rounding.of_sum(4 * group)
    slack, lost = 1 + error, error / alpha  # the rounding error of x - mu is relative to x

    def bound(x: Reach) -> Reach:
        return Reach.of(
            call.out,
            norm=min(slack * math.sqrt(x.size) + lost * x.norm, slack * x.norm / alpha),
            entry=min(slack * math.sqrt(group) + lost * x.norm, slack * 2 * x.entry / alpha),
        )

    return PlainRule(bound, slack / alpha)
