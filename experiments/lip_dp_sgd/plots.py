"""Plots of figures 1 to 4."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from experiments.harness.drawing import can_draw, picture
from experiments.harness.store import Store
from experiments.lip_dp_sgd.grid import BIASED, EPSILONS, TIMED, image_rows
from experiments.lip_dp_sgd.records import Results, mean_of
from experiments.lip_dp_sgd.sets import DIGITS, IMAGES
from experiments.lip_dp_sgd.trial import TITLES

_COLORS = {"dp-sgd": "tab:blue", "lip": "tab:red", "plain": "0.5"}


def plot_all(store: Store, quick: bool, folder: Path) -> list[Path]:
    """Write all plots that have results; returns the files."""
    results = Results(store.cells, quick)
    drawn: list[Path] = []
    for name, draw in (("1", _images), ("2", _times), ("3", _bias), ("4", _averaged)) if can_draw() else ():
        if results.has(name):
            drawn += picture(folder / f"figure-{name}.svg", partial(draw, results=results, quick=quick))
    return drawn


def _panels(canvas: Any, names: list[str]) -> dict[str, Any]:
    canvas.set_size_inches(3.6 * len(names), 3.4)
    axes = canvas.subplots(1, len(names), squeeze=False)[0]
    for name, axis in zip(names, axes, strict=True):
        axis.set_title(name, loc="left", fontsize=9)
    return dict(zip(names, axes, strict=True))


def _images(canvas: Any, results: Results, quick: bool) -> bool:
    """Accuracy over epsilon; dashed without group norm, as in the paper."""
    axes = _panels(canvas, [DIGITS] if quick else list(IMAGES))
    something = False
    for row in image_rows(quick):
        if row.network:
            continue  # in the table
        points = [(e, found) for e in EPSILONS if (found := mean_of(results.tested("1", row, e))) is not None]
        if points:
            something = True
            style = "--" if row.norm == "none" else "-"
            label = f"{TITLES[row.method]}, {'no norm' if row.norm == 'none' else 'group norm'}"
            x, y = zip(*points, strict=True)
            axes[row.data].plot(x, y, style, marker="o", markersize=3, color=_COLORS[row.method], label=label)
            axes[row.data].set_xlabel("epsilon")
    first = next(iter(axes.values()))
    first.set_ylabel("test accuracy")
    if something:
        first.legend(frameon=False, fontsize=7)
    return something


def _times(canvas: Any, results: Results, quick: bool) -> bool:
    timed = {DIGITS: (64, 256)} if quick else TIMED
    axes = _panels(canvas, list(timed))
    something = False
    for name, sizes in timed.items():
        found = {
            s: c["seconds_of_an_epoch"] for s in sizes for c in results.at("2", f"{name}/{s}") if "failed" not in c
        }
        for method in ("plain", "dp-sgd", "lip") if found else ():
            something = True
            seconds = [values[method] for values in found.values()]
            axes[name].plot(list(found), seconds, marker="o", markersize=3, color=_COLORS[method], label=TITLES[method])
        axes[name].set_xscale("log", base=2)
        axes[name].set_ylim(bottom=0)
        axes[name].set_xlabel("batch size")
    first = next(iter(axes.values()))
    first.set_ylabel("seconds of an epoch")
    if something:
        first.legend(frameon=False, fontsize=7)
    return something


def _bias(canvas: Any, results: Results, quick: bool) -> bool:
    names = [DIGITS] if quick else list(BIASED)
    axes = _panels(canvas, names)
    something = False
    for name in names:
        for cell in results.at("3", name):
            if curve := cell.get("curve"):
                something = True
                steps = [place["step"] for place in curve]
                axes[name].plot(steps, [p["error"] for p in curve], color="tab:blue", label="error of clipping")
                axes[name].plot(steps, [p["clipped"] for p in curve], "--", color="tab:red", label="clipped mean")
                axes[name].set_xlabel("step")
                axes[name].legend(frameon=False, fontsize=7)
    axes[names[0]].set_ylabel("norm")
    return something


def _averaged(canvas: Any, results: Results, quick: bool) -> bool:
    axis = _panels(canvas, ["averaged parameters"])["averaged parameters"]
    something = False
    for row in image_rows(quick):
        for what, style in (("accuracy", "--"), ("averaged_accuracy", "-")):
            cells = {e: results.tested("4", row, e) for e in EPSILONS}
            points = [(e, statistics.fmean(c[what] for c in found)) for e, found in cells.items() if found]
            if points:
                something = True
                x, y = zip(*points, strict=True)
                label = f"{TITLES[row.method]}, {'last' if what == 'accuracy' else 'averaged'}"
                axis.plot(x, y, style, marker="o", markersize=3, color=_COLORS[row.method], label=label)
    axis.set_xlabel("epsilon")
    axis.set_ylabel("test accuracy")
    if something:
        axis.legend(frameon=False, fontsize=7)
    return something
