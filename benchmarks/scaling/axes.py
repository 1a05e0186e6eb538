"""The axes: positions, examples and width, each with everything else fixed."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.rows import Row
from benchmarks.workload import Setting
from clipwise.errors import ConfigurationError


@dataclass(frozen=True)
class Axis:
    """Rows that differ in one number.

    Args:
        name: the name of that number for `--row`, in plots and in tables.
        title: what grows, and in which network.
        rows: the rows by that number, in increasing order.
    """

    name: str
    title: str
    rows: dict[int, Row]


def _axis(name: str, title: str, network: str, settings: dict[int, Setting]) -> Axis:
    rows = {x: Row(f"{name}={x}", f"{network}, {name}={x}", setting, targets=()) for x, setting in settings.items()}
    return Axis(name, f"{title}: {network}", rows)


def _positions(network: str, model: str, text: str, batch: int, lengths: tuple[int, ...]) -> Axis:
    settings = {T: Setting(model, f"{text}-{T}", batch) for T in lengths}
    return _axis("T", "Positions", f"{network}, B={batch}", settings)


def _examples(batches: tuple[int, ...]) -> Axis:
    return _axis("B", "Examples", "CNN", {B: Setting("cnn", "mnist", B) for B in batches})


def _widths(batch: int, widths: tuple[int, ...]) -> Axis:
    settings = {width: Setting(f"mlp-4x{width}", "mnist", batch) for width in widths}
    return _axis("width", "Width", f"MLP with 4 hidden layers, B={batch}", settings)


ON_CUDA = (
    _positions("GPT-2 small", "gpt2-small", "text", 8, (64, 128, 256, 512, 1024, 2048)),
    _examples((16, 32, 64, 128, 256, 512, 1024)),
    _widths(512, (256, 512, 1024, 2048, 4096, 8192)),
)
ON_CPU = (
    _positions("one-block Transformer", "transformer", "imdb", 16, (32, 64, 128, 256, 512)),
    _examples((16, 32, 64, 128, 256, 512, 1024)),
    _widths(256, (128, 256, 512, 1024, 2048)),
)
# A check that the suite runs.
QUICK = (
    _positions("one-block Transformer", "transformer", "imdb", 2, (8, 16)),
    _examples((2, 4)),
    _widths(4, (128, 256)),
)


def axes_for(device: str, *, quick: bool = False, wanted: list[str] | None = None) -> list[Axis]:
    """The selected axes of a device, or all."""
    axes = QUICK if quick else ON_CUDA if device == "cuda" else ON_CPU
    known = [axis.name for axis in axes]
    for name in wanted or []:
        if name not in known:
            raise ConfigurationError(f"row={name!r} is no axis: use one of {', '.join(known)}.")
    return [axis for axis in axes if not wanted or axis.name in wanted]
