"""What commands print: tables and plain lines on stdout, warnings and errors on stderr."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal

from rich.console import Console
from rich.text import Text

from clipwise.accounting.tradeoff import Tradeoff
from clipwise.privacy import Adjacency, Unit

_CHANGES = {
    Adjacency.ZERO_OUT: "replaced by an empty one",
    Adjacency.ADD_REMOVE: "added or removed",
    Adjacency.REPLACE_ONE: "replaced by any other",
}


def stdout() -> Console:
    """Where results go. Without a terminal there are no colours and nothing moves."""
    return Console(highlight=False)


def say(text: str, *, console: Console | None = None, style: str = "") -> None:
    """Print text as it is: no markup in it, and no line breaks that a pipe would keep."""
    (console or stdout()).print(Text(text, style=style), soft_wrap=True)


def remark(text: str, style: str = "") -> None:
    """A line on stderr: stdout holds results, which may be read by a machine."""
    say(text, console=Console(stderr=True, highlight=False), style=style)


def rounded_up(value: float, digits: int = 4) -> str:
    """An upper bound for people: rounded, but never below what was proven."""
    if not math.isfinite(value):
        return "infinite"
    short = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(value))
    return f"{float(short):g}"


def in_words(
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    unit: Unit = Unit.RECORD,
    curve: Tradeoff | None = None,
) -> str:
    """What (epsilon, delta) promises, in words.

    From P(S) <= e^epsilon Q(S) + delta for every outcome S and both orders of the neighbours: a test with
    false alarms at rate a detects at most min(e^epsilon a + delta, 1 - e^-epsilon (1 - delta - a)). The whole
    trade-off curve, where it is known, bounds that better.
    """
    if not math.isfinite(epsilon):
        return "No noise, or too little of it: nothing is promised."
    alarms = 0.01
    power = min(math.exp(min(epsilon, 700)) * alarms + delta, 1 - math.exp(-epsilon) * (1 - delta - alarms))
    # Beyond this e^epsilon has no float: it is not written out then.
    factor = f" = {rounded_up(math.exp(epsilon), 3)}" if epsilon < 700 else ""
    if curve is not None:
        power = min(power, curve.power(alarms))
    return (
        f"In words: if one {unit} is {_CHANGES[adjacency]}, the chance of any outcome grows by a factor of at "
        f"most e^epsilon{factor}, plus {delta:g}. An attacker who knows "
        f"all other {unit}s, and may be wrong about 1 innocent case in 100, notices the change in at most "
        f"{rounded_up(100 * power, 3)} of 100."
    )
