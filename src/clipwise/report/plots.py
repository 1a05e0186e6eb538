"""Plots of a guarantee: epsilon over steps, the trade-off curve, delta over epsilon.

Lines differ in style, not only in colour. The same history gives the same file, byte for byte, with the same version
of matplotlib. matplotlib is imported only when a plot is drawn.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from clipwise.accounting import accountants
from clipwise.accounting.composition import compose
from clipwise.accounting.tradeoff import Tradeoff, of, profile
from clipwise.errors import ConfigurationError, UnsupportedEventError
from clipwise.privacy import Entry, rounded_up
from clipwise.report.series import chosen_steps, first_steps, is_schedule
from clipwise.report.wording import small

# The file formats, and the metadata to leave out so that files are reproducible.
METADATA: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
STYLE = {
    "svg.hashsalt": "clipwise",  # reproducible ids in the file
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# The accountants and their line styles; the first one is used for the guarantee.
LINES: dict[str, dict[str, Any]] = {
    "pld": {"color": "black", "linestyle": "-", "linewidth": 2, "label": "PLD (used for the guarantee)"},
    "rdp": {"color": "tab:blue", "linestyle": "--", "label": "RDP"},
    "zcdp": {"color": "tab:orange", "linestyle": "-.", "marker": "x", "markevery": (0.05, 0.1), "label": "zCDP"},
    "gdp": {
        "color": "tab:red",
        "linestyle": ":",
        "marker": "o",
        "markerfacecolor": "white",
        "markevery": (0.1, 0.1),
        "label": "Gaussian DP",
    },
}
POINTS = 16
POINTS_OVER_EPSILON = 200
POINTS_OF_RATES = 501
FEWEST_ALARMS = 1e-5
SMALLEST_DELTAS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2)


def epsilon_over_steps(history: Sequence[Entry], delta: float, path: str | Path) -> None:
    """Plot epsilon over the number of steps, for each accountant that supports the history.

    Args:
        history: past or planned releases, in order.
        delta: the delta of the guarantee.
        path: the file, ending in .png or .svg.
    """
    with picture(path, describe(history), (6.0, 4.4)) as (axes,):
        steps = chosen_steps(history, POINTS)
        prefixes = [compose(first_steps(history, n)) for n in steps]
        for name in _compared(history):
            epsilons = _bounds(partial(accountants.composed_epsilon, delta=delta, accountant=name), prefixes)
            if epsilons:
                axes.plot([0, *steps], [0.0, *epsilons], **LINES[name])
        if not axes.lines:
            raise ConfigurationError(
                "history: its epsilon is infinite from the first step on, so there is nothing to plot."
            )
        axes.set_xlim(0, 1.02 * steps[-1])
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("steps")
        axes.set_ylabel(f"epsilon at delta = {small(delta)}")
        axes.legend(frameon=False, loc="lower right")


def tradeoff_curve(history: Sequence[Entry], path: str | Path, *, measured: float | None = None) -> None:
    """Plot the trade-off function of a history, and the detection rate at low false-positive rates.

    Args:
        history: past or planned releases.
        path: the file, ending in .png or .svg.
        measured: also plot G_mu for this mu, measured by an attack.
    """
    with picture(path, describe(history), (9.4, 4.4), panels=2) as (rates, few_alarms):
        curve = of(history)
        curves = [(curve, {"color": "black", "linewidth": 2, "label": "bound on every test"})]
        if measured is not None:
            line = {**LINES["zcdp"], "label": f"measured attack, mu = {measured:.3g}"}
            curves.append((Tradeoff.gaussian(measured), line))
        _rates(rates, curves)
        _few_alarms(few_alarms, curves)


def _rates(axes: Any, curves: Sequence[tuple[Tradeoff, dict[str, Any]]]) -> None:
    """False-negative over false-positive rate. Tests may reach the area between random guessing and the curve."""
    alphas = np.linspace(0.0, 1.0, POINTS_OF_RATES)
    curve = curves[0][0]
    axes.fill_between(alphas, curve(alphas), 1 - alphas, color="0.92", linewidth=0)
    axes.plot([0, 1], [1, 0], color="0.45", linestyle="--", label="random guessing: 1 - alpha")
    for f, line in curves:
        axes.plot(alphas, f(alphas), **line)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel("false-positive rate alpha")
    axes.set_ylabel("false-negative rate f(alpha)")
    axes.legend(frameon=False, loc="upper right", title=f"advantage at most {rounded_up(curve.advantage())}")


def _few_alarms(axes: Any, curves: Sequence[tuple[Tradeoff, dict[str, Any]]]) -> None:
    """Detection rate over false-positive rate, on logarithmic scales."""
    alphas = np.geomspace(FEWEST_ALARMS, 1.0, POINTS_OF_RATES)
    axes.fill_between(alphas, alphas, 1 - curves[0][0](alphas), color="0.92", linewidth=0)
    axes.plot(alphas, alphas, color="0.45", linestyle="--")
    for f, line in curves:
        axes.plot(alphas, 1 - f(alphas), **line)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(FEWEST_ALARMS, 1)
    axes.set_ylim(FEWEST_ALARMS, 1)
    axes.set_aspect("equal")
    axes.set_xlabel("false-positive rate alpha")
    axes.set_ylabel("detection rate 1 - f(alpha)")
    axes.set_title("low false-positive rates", loc="left", fontsize=9)


def delta_profile(history: Sequence[Entry], path: str | Path) -> None:
    """Plot delta over epsilon, with a logarithmic delta axis.

    Args:
        history: past or planned releases.
        path: the file, ending in .png or .svg.
    """
    with picture(path, describe(history), (6.0, 4.4)) as (axes,):
        total = compose(history)
        ends = ((accountants.composed_epsilon(total, d), d) for d in SMALLEST_DELTAS)
        end, smallest = next(((e, d) for e, d in ends if math.isfinite(e)), (math.inf, 1.0))
        if end in (0.0, math.inf):
            extent = "infinite" if end else "0"
            raise ConfigurationError(f"history: its epsilon is {extent} at every delta, so there is nothing to plot.")
        epsilons = np.linspace(0.0, end, POINTS_OVER_EPSILON)
        axes.plot(epsilons, profile(history, epsilons), **LINES["pld"])
        for name in _compared(history)[1:]:
            deltas = _bounds(partial(accountants.composed_delta, total, accountant=name), epsilons.tolist())
            if deltas and min(deltas) < 1:
                axes.plot(epsilons, deltas, **LINES[name])
        axes.set_yscale("log")
        axes.set_xlim(0, 1.02 * end)
        axes.set_ylim(smallest, 1)
        axes.set_xlabel("epsilon")
        axes.set_ylabel("smallest delta")
        axes.legend(frameon=False, loc="upper right")


def _compared(history: Sequence[Entry]) -> list[str]:
    """The accountants to plot; PLD, which gives the guarantee, comes first. For a schedule the others take seconds."""
    return list(LINES)[:1] if is_schedule(history) else list(LINES)


def _bounds(bound: Callable[[Any], float], places: Sequence[Any]) -> list[float]:
    """The bound at every place; empty if the accountant has no finite bound."""
    try:
        found = [bound(place) for place in places]
    except UnsupportedEventError:
        return []
    return found if all(map(math.isfinite, found)) else []


@contextmanager
def picture(path: str | Path, title: str, size: tuple[float, float], panels: int = 1) -> Iterator[list[Any]]:
    """Empty axes with a title. The figure is written to the file at the end of the block."""
    file = Path(path)
    kind = file.suffix.lower()
    if kind not in METADATA:
        raise ConfigurationError(f"path={str(path)!r} is not supported: the file name must end in .png or .svg.")
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigurationError(
            "Plots require matplotlib, which is not installed: run `pip install 'clipwise-dp[plots]'`."
        ) from error
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        canvas = figures.Figure(figsize=size, layout="constrained")
        axes = list(canvas.subplots(1, panels, squeeze=False)[0])
        axes[0].set_title(title, loc="left", fontsize=9)
        yield axes
        picture = BytesIO()
        canvas.savefig(picture, format=kind[1:], dpi=150, metadata=METADATA[kind])
    try:
        file.write_bytes(picture.getvalue())
    except OSError as error:
        raise ConfigurationError(f"path={str(path)!r} cannot be written: {error.strerror}.") from error


def describe(history: Sequence[Entry]) -> str:
    """The title: sampling, adjacency and unit; then noise, sample rate and steps."""
    if not any(entry.count for entry in history):
        raise ConfigurationError("history: it is empty, so there is nothing to plot.")
    compose(history)  # raises if no single guarantee covers the history
    events = [entry.event for entry in history if entry.count]
    schemes = list(dict.fromkeys(str(event.sampling) for event in events))
    first = events[0]
    return (
        f"{' and '.join(schemes).capitalize()} sampling, {first.adjacency} of one {first.unit}\n"
        f"noise multiplier {_range([e.noise_multiplier for e in events])}, "
        f"sample rate {_range([e.sample_rate for e in events])}, "
        f"{sum(entry.count for entry in history):,} steps"
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"
