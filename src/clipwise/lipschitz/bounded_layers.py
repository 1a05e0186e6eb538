"""Bounds of clipwise layers: clipped inputs, bounded normalization, L2 attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clipwise.layers.bounded import BoundedGroupNorm, L2Mixture
from clipwise.lipschitz.rule import Call, Norms, PlainRule, Reach, Rule


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


class MixtureRule(Rule):
    """y_i = sum_j P_ij v_j, P = softmax of L_ij = -s_ij^2, s_ij^2 = |u_i - u_j|^2 / sqrt(d), over T positions.

    Values: the rows of P sum to 1, so |P| <= sqrt(T), and |y_i| <= max_j |v_j| = R.
    Places: d y_i is the covariance of dL_i and v under P_i, at most std(dL_i) R, and

        sum_i E dL_i^2 <= (4 / sqrt(d)) sum_ij P_ij s_ij^2 |du_i - du_j|^2.

    A position attends to itself with L_ii = 0, so P_ij <= exp(-s_ij^2) and P_ij s_ij^2 <= 1/e: the sum is at most
    2 T |du|^2 / e. It is also at most max s^2 times 2 (T + 1) |du|^2. Each head uses its own columns of u and v.
    """

    def __init__(self, call: Call) -> None:
        module: L2Mixture = call.target
        self.out = call.out
        if call.shapes[0] != call.shapes[1] or len(self.out) != 2:
            raise call.refusal("places and values must both have the shape (batch, positions, width)")
        self.root = math.sqrt(self.out[-2])
        self.depth = self.out[-1] // module.heads
        self.slack = 1 + 4 * call.rounding.of_sum(self.depth + self.out[-2])

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        _, v = reaches
        # In each head y_i is a weighted mean of values.
        row = math.sqrt(self.out[-1] / self.depth) * v.row
        return Reach.of(self.out, self.slack * self.root * v.norm, self.slack * row, self.slack * v.entry)

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        u, v = reaches
        length = self.out[-2]
        apart = (2 * u.row) ** 2 / math.sqrt(self.depth)  # the largest s^2
        moved = min(2 * length / math.e, apart * 2 * (length + 1))
        places = self.slack * v.row * math.sqrt(4 / math.sqrt(self.depth) * moved)
        return places, self.slack * self.root
