"""Compares the uses of a new graph with plain autograd before anything derived from them is released.

A wrong rule (it misreads torch's saved tensors, or a user's rule has a bug) is wrong for every example. One example
shows it, unless its gradient is 0 there. So an operand of a use is trusted only after examples with a nonzero gradient
there agreed on two batches. A branch that few examples take is compared when the first such example arrives.

Most operands need one example on each of the first two batches. An operand with a gradient that is pure rounding error
(the bias of attention's keys) is inconclusive. The check gives up on it after a few examples, which bounds the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from clipwise.errors import UnsupportedModelError
from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.forms.base import roundoff
from clipwise.gradients.layout import Layout
from clipwise.gradients.outline import Operand, Trust
from clipwise.gradients.plain import single
from clipwise.sampling.generators import private_generator

# The norm of a single number, for example, is pure rounding error divided by a small epsilon. But no precision
# explains an error above a thousandth of the arriving gradient.
_ROUNDING, _MOST_ROUNDING = 1e3, 1e-3
_UNDERFLOW = 1e-30  # gradients this short may have lost digits to underflow
_MOST_EXAMPLES = 3  # per batch


class Examined(NamedTuple):
    """The parameters that disagreed for one example, and those with a gradient large enough to be conclusive."""

    wrong: set[str]
    telling: set[str]


def has_gradient(outputs: Mapping[int, Tensor], layouts: Mapping[int, Layout]) -> Tensor:
    """Which examples have a nonzero, finite gradient at the outputs of a use: [B]."""
    rows = [layouts[k].split(g).flatten(1) for k, g in outputs.items()]
    live_B = torch.stack([g_Bn.ne(0).any(1) for g_Bn in rows]).any(0)
    return live_B & torch.stack([torch.isfinite(g_Bn).all(1) for g_Bn in rows]).all(0)


def check(
    examine: Callable[[int], Examined],
    live: Mapping[Operand, Tensor],
    behind: Mapping[Operand, tuple[str, ...]],
    trust: Trust,
) -> None:
    """Raise unless, at each operand with a gradient, the gradients of some example agree with plain autograd.

    Args:
        examine: compares the gradients of one example.
        live: for each operand to compare, which examples have a gradient there: [B].
        behind: the parameters behind each operand.
        trust: records the outcome.
    """
    live_OB = {operand: live_B.cpu().clone() for operand, live_B in live.items()}
    wrong: dict[Operand, str] = {}
    order_B = torch.randperm(len(next(iter(live_OB.values()))), generator=private_generator())
    for _ in range(_MOST_EXAMPLES):
        if not live_OB:
            break
        # In a random order, the first example with a gradient at the largest number of remaining operands.
        count_B = torch.stack([live_B[order_B] for live_B in live_OB.values()]).sum(0)
        if not bool(count_B.any()):
            break
        example = int(order_B[count_B.argmax()])
        found = examine(example)
        for operand in [o for o, live_B in live_OB.items() if bool(live_B[example])]:
            live_OB[operand][example] = False
            disagreeing = found.wrong.intersection(behind[operand])
            if disagreeing:
                wrong[operand] = min(disagreeing)
                continue
            agrees = bool(found.telling.intersection(behind[operand]))
            trust.note(operand, agrees)
            if agrees:
                wrong.pop(operand, None)
                del live_OB[operand]
    if wrong:
        raise UnsupportedModelError(
            f"The per-example gradient of {min(wrong.values())!r} does not agree with plain autograd, so clipwise "
            "cannot guarantee its norm. Please report this model, and use method='loop', which is exact."
        )


def examined(
    result: PerExampleGradients, losses: Tensor, example: int, parameters: Parameters, arriving: float
) -> Examined:
    """Compare one example's gradients with plain autograd, up to rounding.

    `arriving` is the largest gradient entry of the example at any use; rounding scales with it.
    """
    truth, thrice = (single(losses, example, parameters, weight=w) for w in (1, 3))
    ours = result.instantiate(slice(example, example + 1))
    # Where terms cancel, rounding errors are large relative to the result. A loss scaled by 3 shows them.
    noise = max(_norm(thrice[name] / 3 - t) for name, t in truth.items())
    # In bfloat16 this difference is already half a per cent.
    noise *= 100 if roundoff(losses.dtype) < 1e-6 else 10
    rounding = min(_ROUNDING * roundoff(losses.dtype), _MOST_ROUNDING) * arriving
    rounding += 1e-5 * max(result.mass(example), *map(_norm, truth.values())) + noise + _UNDERFLOW
    found = Examined(set(), set())
    for name, t in truth.items():
        norm = _norm(t)
        if _norm(ours[name][0] - t) > 1e-2 * norm + rounding:  # False for NaN, which is muted anyway
            found.wrong.add(name)
        if norm > 2 * rounding:  # then a gradient of 0 would have counted as wrong
            found.telling.add(name)
    return found


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.complex128 if t.is_complex() else torch.float64))
