"""Bounds of the layers of clipwise: clipped inputs, bounded normalization, attention by distances."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clipwise.layers.clip_input import ClipInput
from clipwise.layers.l2_attention import L2Mixture
from clipwise.lipschitz.reach import Reach
from clipwise.lipschitz.rule import Norms, Rounding, Rule


class ClipInputRule(Rule):
    """|y| <= C whatever comes in; a projection onto a ball does not stretch."""

    def __init__(self, module: ClipInput, out: Sequence[int], rounding: Rounding) -> None:
        self.module, self.out, self.rounding = module, tuple(out), rounding

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(self.out, norm=self.module.max_norm * (1 + self.rounding.of_elements))

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (1 + self.rounding.of_sum(math.prod(self.out)),)


class BoundedNormRule(Rule):
    """(x - mu) / max(alpha, sigma) over groups of m numbers.

    The Jacobian is a projection over max(alpha, sigma): |J| <= 1 / alpha. |y| <= min(sqrt(n), |x| / alpha); a single
    number is at most sqrt(m - 1), when it alone differs from the others.
    """

    def __init__(self, alpha: float, group: int, out: Sequence[int], rounding: Rounding) -> None:
        self.alpha, self.group, self.out = alpha, group, tuple(out)
        self.slack = rounding.of_sum(4 * group)

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        lost = self.slack / self.alpha  # x - mu is rounded relative to x, not to itself
        longest = (1 + self.slack) * math.sqrt(self.group)
        return Reach.of(
            self.out,
            norm=min(
                (1 + self.slack) * math.sqrt(x.size) + lost * x.norm, (1 + self.slack) * x.norm / self.alpha
            ),
            entry=min(
                longest + lost * x.norm,
                (1 + self.slack) * 2 * x.entry / self.alpha,
            ),
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return ((1 + self.slack) / self.alpha,)


class MixtureRule(Rule):
    """y_i = sum_j P_ij v_j, P = softmax of L_ij = -s_ij^2, s_ij^2 = |u_i - u_j|^2 / sqrt(d), over T positions.

    Values: P has rows that sum to 1, so |P| <= sqrt(T), and |y_i| <= max_j |v_j| = R.
    Places: d y_i is the covariance of dL_i and v under P_i, at most std(dL_i) R, and

        sum_i E dL_i^2 <= (4 / sqrt(d)) sum_ij P_ij s_ij^2 |du_i - du_j|^2.

    A position attends to itself with L_ii = 0, so P_ij <= exp(-s_ij^2) and P_ij s_ij^2 <= 1/e: the sum is at most
    2 T |du|^2 / e. It is also at most max s^2 times 2 (T + 1) |du|^2. Heads take columns of their own of u and v.
    """

    def __init__(self, module: L2Mixture, out: Sequence[int], rounding: Rounding) -> None:
        self.out = tuple(out)
        self.depth = out[-1] // module.heads
        self.slack = 1 + 4 * rounding.of_sum(self.depth + out[-2])

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        _, v = reaches
        return Reach.of(
            self.out, self.slack * self._root * v.norm, self.slack * self._root_heads(v), self.slack * v.entry
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        u, v = reaches
        length = self.out[-2]
        apart = (2 * u.row) ** 2 / math.sqrt(self.depth)  # the largest s^2
        moved = min(2 * length / math.e, apart * 2 * (length + 1))
        return (
            self.slack * v.row * math.sqrt(4 / math.sqrt(self.depth) * moved),
            self.slack * self._root,
        )

    @property
    def _root(self) -> float:
        return math.sqrt(self.out[-2])

    def _root_heads(self, v: Reach) -> float:
        """|y_i|: within each head a mean of values, so at most the root of the sum of their largest squares."""
        return math.sqrt(self.out[-1] / self.depth) * v.row
