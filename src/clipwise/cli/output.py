"""Output of the commands: tables and plain lines on stdout, warnings and errors on stderr; checks of output files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from clipwise import privacy
from clipwise.accounting.tradeoff import Tradeoff
from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import require_writable
from clipwise.ledger.run_description import plain
from clipwise.privacy import Adjacency, Unit
from clipwise.report.plots import METADATA
from clipwise.report.wording import CHANGED


def stdout() -> Console:
    """The console for results. Without a terminal it has no colours and no live display."""
    return Console(highlight=False)


def is_live(console: Console) -> bool:
    """Whether lines can be overwritten. Notebooks force colours and may use a terminal, but keep every line."""
    return console.is_terminal and console.file.isatty() and "JPY_PARENT_PID" not in os.environ


def say(text: str, *, console: Console | None = None, style: str = "") -> None:
    """Print text without markup and without wrapping."""
    (console or stdout()).print(Text(text, style=style), soft_wrap=True)


def remark(text: str, style: str = "") -> None:
    """Print a line on stderr, because programs may parse stdout."""
    say(text, console=Console(stderr=True, highlight=False), style=style)


def say_json(content: object) -> None:
    """Print a document as JSON; infinity and NaN become null."""
    say(json.dumps(plain(content), indent=2, ensure_ascii=False))


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count} {noun}{'s' * (count != 1)}"


def rounded_up(value: float, digits: int = 4) -> str:
    """An upper bound for display, rounded up."""
    return f"{float(privacy.rounded_up(value, digits)):g}" if math.isfinite(value) else "infinite"


def in_words(
    epsilon: float, delta: float, adjacency: Adjacency, unit: Unit = Unit.RECORD, curve: Tradeoff | None = None
) -> str:
    """The meaning of (epsilon, delta) in words.

    From P(S) <= e^epsilon Q(S) + delta for every outcome S and both orders of the neighbours: a test with
    false-positive rate a detects at most min(e^epsilon a + delta, 1 - e^-epsilon (1 - delta - a)). The full
    trade-off curve, where it is known, gives a better bound.
    """
    if not math.isfinite(epsilon):
        return "No noise, or too little of it: there is no guarantee."
    alarms = 0.01
    power = min(math.exp(min(epsilon, 700)) * alarms + delta, 1 - math.exp(-epsilon) * (1 - delta - alarms))
    # e^epsilon overflows a float above this.
    factor = f" = {rounded_up(math.exp(epsilon), 3)}" if epsilon < 700 else ""
    if curve is not None:
        power = min(power, curve.power(alarms))
    return (
        f"In words: if one {unit} is {CHANGED[adjacency]}, the chance of any outcome grows by a factor of at "
        f"most e^epsilon{factor}, plus {delta:g}. An attacker who knows "
        f"all other {unit}s and raises a false alarm in 1 of 100 cases detects the change in at most "
        f"{rounded_up(100 * power, 3)} of 100."
    )


def require_picture(file: Path | None) -> None:
    """Refuse a --plot file that cannot be written."""
    if file is None:
        return
    if file.suffix.lower() not in METADATA:
        raise ConfigurationError(f"--plot {file} is not possible: plot files end in {' or '.join(METADATA)}.")
    require_writable("--plot", file)


def draw(plot: Path | None, draw_to: Callable[[Path], object]) -> None:
    """Draw to the file of --plot, if it is given."""
    if plot is not None:
        draw_to(plot)
        remark(f"Plot written to {plot}")
