"""The uses of a new graph are compared with plain autograd before anything that they give is released.

A rule that reads torch's saved tensors wrongly, or a user's own rule with a mistake in it, would be wrong for every
example. One example shows it, unless its gradient is 0 there: 0 agrees with every wrong rule that gives 0. So each
operand of each use is trusted only after examples with a gradient there have agreed, on two batches. A branch that few
examples take is compared when one of them comes, however late.

Most operands are settled by one example on each of the first two batches. Those with a gradient that is all rounding
(the bias of attention's keys) decide nothing, and are given up after a few examples; so the cost is bounded.
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
from clipwise.noise.generators import private_generator

# A norm of a single number, say, is all rounding, divided by a small epsilon. But no precision excuses more than a
# thousandth of what arrives.
_ROUNDING, _MOST_ROUNDING = 1e3, 1e-3
_UNDERFLOW = 1e-30  # gradients so short may have lost their digits on the way
_MOST_EXAMPLES = 3  # of a batch


class Examined(NamedTuple):
    """What one example showed: parameters that disagreed, and those whose gradient was long enough to do so."""

    wrong: set[str]
    telling: set[str]


def has_gradient(outputs: Mapping[int, Tensor], layouts: Mapping[int, Layout]) -> Tensor:
    """Which examples have a gradient, a finite one, at the outputs of a use: [B]."""
    rows = [layouts[k].split(g).flatten(1) for k, g in outputs.items()]
    live_B = torch.stack([g_Bn.ne(0).any(1) for g_Bn in rows]).any(0)
    return live_B & torch.stack([torch.isfinite(g_Bn).all(1) for g_Bn in rows]).all(0)


def check(
    examine: Callable[[int], Examined],
    live: Mapping[Operand, Tensor],
    behind: Mapping[Operand, tuple[str, ...]],
    trust: Trust,
) -> None:
    """Raise unless the gradients are the true ones of some example with a gradient, at each operand where there is one.

    Args:
        examine: compares the gradients of one example.
        live: the operands that are to be compared, and which examples have a gradient there: [B] each.
        behind: the parameters behind each operand.
        trust: takes the outcome in.
    """
    live_OB = {operand: live_B.cpu().clone() for operand, live_B in live.items()}
    wrong: dict[Operand, str] = {}
    order_B = torch.randperm(len(next(iter(live_OB.values()))), generator=private_generator())
    for _ in range(_MOST_EXAMPLES):
        if not live_OB:
            break
        # The first, in a random order, of the examples with a gradient at most of the operands that are left.
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
            "cannot be sure of its norm. Please report this model; method='loop' is exact."
        )


def examined(
    result: PerExampleGradients,
    losses: Tensor,
    example: int,
    parameters: Parameters,
    arriving: float,
) -> Examined:
    """Compare one example's gradients with those of plain autograd, up to rounding.

    `arriving` is the largest gradient that arrives at a use from the example: rounding scales with it.
    """
    truth, thrice = (single(losses, example, parameters, weight=w) for w in (1, 3))
    ours = result.instantiate(slice(example, example + 1))
    # Where terms cancel, rounding is large beside the result: three times the loss rounds otherwise.
    noise = max(_norm(thrice[name] / 3 - t) for name, t in truth.items())
    # In bfloat16 that already is half a per cent.
    noise *= 100 if roundoff(losses.dtype) < 1e-6 else 10
    rounding = min(_ROUNDING * roundoff(losses.dtype), _MOST_ROUNDING) * arriving
    rounding += 1e-5 * max(result.mass(example), *map(_norm, truth.values())) + noise + _UNDERFLOW
    found = Examined(set(), set())
    for name, t in truth.items():
        norm = _norm(t)
        if _norm(ours[name][0] - t) > 1e-2 * norm + rounding:  # False for NaN: it will be muted anyway
            found.wrong.add(name)
        if norm > 2 * rounding:  # a gradient of 0 would have been found wrong
            found.telling.add(name)
    return found


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.complex128 if t.is_complex() else torch.float64))
