"""Plots of figure 5, and of signal and noise per layer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from experiments.backprop_clipping.grid import EPSILONS, SIGNALS, private_methods, sets, signal_rows
from experiments.backprop_clipping.records import Results
from experiments.backprop_clipping.search import Row
from experiments.backprop_clipping.trial import METHODS, OPEN
from experiments.harness.drawing import can_draw, picture
from experiments.harness.store import Store

_LINES: dict[str, tuple[str, str]] = {
    "dp-sgd-tanh": ("tab:blue", "-"),
    "dp-sgd-relu": ("tab:blue", "--"),
    "dp-sgd-layer": ("tab:blue", ":"),
    "dp-sgd-norm": ("tab:blue", "-."),
    "upstream-clip": ("tab:orange", "--"),
    "upstream-normalize": ("tab:orange", "-"),
    "gradient-clip": ("tab:red", "--"),
    "gradient-clip-tanh": ("tab:red", ":"),
    "gradient-clip-norm": ("tab:red", "-."),
    "gradient-normalize": ("tab:red", "-"),
    "plain": ("0.4", ":"),
    "clipped": ("0.4", "-."),
    "clipped-upstream": ("0.4", "--"),
}


def plot_all(store: Store, quick: bool, folder: Path) -> list[Path]:
    """Write all plots that have results; returns the files."""
    results = Results(store.cells, quick)
    drawn: list[Path] = []
    for figure, draw in (("5", _accuracies), ("signal", _signals)) if can_draw() else ():
        if results.has(figure):
            drawn += picture(folder / f"figure-{figure}.svg", partial(draw, results=results))
    return drawn


def _accuracies(canvas: Any, results: Results) -> bool:
    """Accuracy over epsilon, one panel per data set; horizontal lines without noise."""
    names = sets(results.quick)
    canvas.set_size_inches(3.8 * len(names), 3.6)
    something = False
    for name, axis in zip(names, canvas.subplots(1, len(names), squeeze=False)[0], strict=True):
        axis.set_title(name, loc="left", fontsize=9)
        axis.set_xscale("log")
        axis.set_xlabel("epsilon")
        for method in private_methods(name):
            points = [(e, m) for e in EPSILONS[name] if (m := results.mean(Row(name, method, e))) is not None]
            if points:
                something = True
                color, style = _LINES[method]
                x, y = zip(*points, strict=True)
                axis.plot(x, y, style, color=color, marker="o", markersize=3, label=METHODS[method].title)
        for method in OPEN:
            level = results.mean(Row(name, method, None))
            if level is not None:
                color, style = _LINES[method]
                axis.axhline(level, color=color, linestyle=style, label=METHODS[method].title)
        if name == names[0]:
            axis.set_ylabel("test accuracy, percent")
            if something:
                axis.legend(frameon=False, fontsize=6)
    return something


def _signals(canvas: Any, results: Results) -> bool:
    """Top: lengths of mean gradients; bottom: signal over noise. One column per method, one line per layer."""
    curves: dict[str, Any] = {}
    for method in SIGNALS:
        for cell in results.at("signal", method, signal_rows(results.quick)[method].epsilon):
            if cell.get("curve"):
                curves[method] = cell["curve"]
    if not curves:
        return False
    canvas.set_size_inches(3.4 * len(curves), 5.2)
    axes = canvas.subplots(2, len(curves), squeeze=False, sharey="row")
    styles = ("-", "--", "-.", ":")
    for column, (method, curve) in enumerate(curves.items()):
        steps = [p["step"] for p in curve]
        for k, name in enumerate(curve[0]["layers"]):
            layers = [p["layers"][name] for p in curve]
            style = {"color": f"C{k}", "linestyle": styles[k % len(styles)], "label": f"layer {name}"}
            axes[0][column].plot(steps, [layer["gradient"] for layer in layers], **style)
            axes[1][column].plot(steps, [layer["signal"] / layer["noise"] for layer in layers], **style)
        axes[0][column].set_title(METHODS[method].title, loc="left", fontsize=8)
        axes[1][column].set_xlabel("step")
        for axis in axes[:, column]:
            axis.set_yscale("log")
    axes[0][0].set_ylabel("length of the mean gradient")
    axes[1][0].set_ylabel("signal / noise")
    axes[0][0].legend(frameon=False, fontsize=6)
    return True
