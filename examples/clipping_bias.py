"""Per-example gradient clipping biases the optimum; bounded weights do not.

    python examples/clipping_bias.py                # trains with both, prints the final points
    python examples/clipping_bias.py --plot FILE    # and plots them; needs matplotlib

A line is fitted to y = a x + b + e, x uniform on [0, 1], where e is 9 in one case of ten, else -1: 0 on average.
Without clipping the squared loss is smallest at (a, b). With each example's gradient clipped to 1 the rare, long
gradients count as little as the many short ones, and the average clipped gradient is 0 at (a - 0.01765, b - 0.94221).
(Barczewski and Ramon give this example in their appendix E, with opposite signs.)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import fsolve
from torch import nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise import layers, lipschitz

SLOPE, SHIFT = 0.5, 1.0  # a and b
ERRORS = ((9.0, 0.1), (-1.0, 0.9))  # value and probability
CLIP = 1.0
RECORDS, BATCH, EPOCHS, NOISE = 20_000, 2_000, 30, 1.0
STEEPEST = 14.0  # above this residual the Huber loss is linear; no residual here is that large
START = 1.2  # away from (a, b), in both
RATE = 0.1

Point = tuple[float, float]


def average_gradient(offset: Sequence[float], clipped: bool) -> np.ndarray:
    """The average over the population at (a, b) + offset; the integral over x by the midpoint rule."""
    x = (np.arange(4000) + 0.5) / 4000
    total = np.zeros(2)
    for error, probability in ERRORS:
        residual = offset[0] * x + offset[1] - error
        gradients = np.stack([2 * residual * x, 2 * residual])
        if clipped:
            gradients /= np.maximum(1, np.linalg.norm(gradients, axis=0) / CLIP)
        total += probability * gradients.mean(axis=1)
    return total


def biased_point() -> Point:
    """Where the average clipped gradient is 0, as an offset from (a, b)."""
    found = fsolve(lambda offset: average_gradient(offset, clipped=True), [0.0, -0.9], xtol=1e-12)
    return float(found[0]), float(found[1])


def population(seed: int = 0) -> TensorDataset:
    """Records of the example."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(RECORDS, 1, generator=generator)
    (rare, share), (common, _) = ERRORS
    error = torch.where(torch.rand(RECORDS, 1, generator=generator) < share, rare, common)
    return TensorDataset(x, SLOPE * x + SHIFT + error)


def trained(clipping: clipwise.PerExample | clipwise.Lipschitz, epochs: int) -> list[Point]:
    """The path of (slope, shift), as offsets from (a, b), after each step."""
    model = nn.Sequential(layers.ClipInput(1.0), nn.Linear(1, 1))
    nn.init.constant_(model[1].weight, SLOPE + START)
    nn.init.constant_(model[1].bias, SHIFT + START)
    private = clipwise.make_private(
        model,
        torch.optim.SGD(model.parameters(), RATE),
        population(),
        clipping=clipping,
        batch_size=BATCH,
        noise_multiplier=NOISE,
    )
    loss = lipschitz.Huber(STEEPEST)  # half the square, for residuals below
    way: list[Point] = [(START, START)]
    for _ in range(epochs):
        for x, y in private.loader:
            outputs = model(x) if len(x) else None  # a sampled batch may be empty
            private.step(None if outputs is None else 2 * loss(outputs, y), outputs)
            way.append((model[1].weight.item() - SLOPE, model[1].bias.item() - SHIFT))
    return way


def draw(path: Path, ways: dict[str, list[Point]]) -> None:
    """Plot both fields of average gradients, their zeros, and the training paths."""
    import matplotlib.pyplot as plt  # only here: the example runs without it

    plt.rcParams["svg.hashsalt"] = "clipwise"
    figure, axes = plt.subplots(1, 2, figsize=(8, 4), sharex=True, sharey=True, layout="constrained")
    grid = np.linspace(-1.5, 1.5, 9)
    goals = {"gradients clipped": biased_point(), "weights bounded": (0.0, 0.0)}
    for panel, (name, goal) in zip(axes, goals.items(), strict=True):
        field = np.array([[average_gradient((u, v), name == "gradients clipped") for u in grid] for v in grid])
        panel.quiver(grid, grid, -field[..., 0], -field[..., 1], color="0.6", width=0.004)
        panel.plot(*zip(*ways[name], strict=True), color="tab:blue", linewidth=1, label="private training")
        panel.plot(*goal, "x", color="tab:red", markersize=10, label="average gradient is 0")
        panel.plot(0, 0, "o", color="black", fillstyle="none", markersize=12, label="the best line")
        panel.set(title=name, xlabel="slope - a", ylabel="shift - b", xlim=(-1.6, 1.6), ylim=(-1.6, 1.6))
    axes[0].legend(loc="upper left", fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    at_best = np.linalg.norm(average_gradient((0, 0), clipped=True))
    print(f"average clipped gradient at the best line: {at_best:.4f}; it is 0 at (a, b) + ({biased_point()[0]:.5f}, "
          f"{biased_point()[1]:.5f})")  # fmt: skip
    strategies = {
        "gradients clipped": clipwise.PerExample(max_norm=CLIP),
        "weights bounded": clipwise.Lipschitz(4.0, 1.0, loss=lipschitz.Huber(2 * STEEPEST)),  # twice as steep: 2 loss
    }
    ways = {name: trained(how, options.epochs) for name, how in strategies.items()}
    for name, way in ways.items():
        print(f"{name}: private training ends at (a, b) + ({way[-1][0]:.3f}, {way[-1][1]:.3f})")
    if options.plot is not None:
        draw(options.plot, ways)


if __name__ == "__main__":
    main()
