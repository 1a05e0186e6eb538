"""The settings to measure, in order: one entry per figure of the paper."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.workload import Setting
from clipwise.errors import ConfigurationError


@dataclass(frozen=True)
class Figure:
    """A figure of the paper and its settings.

    Args:
        name: its name for `--figure`.
        title: what it shows, and its counterpart in the paper.
        settings: all settings.
        on_cpu: the settings for a CPU; None for all.
        quick: the settings for `--quick`.
        panel, x: the properties of a setting that give the panel and the x axis.
        bars: whether the plot has bars instead of lines.
        largest_batch: whether to search for the largest batch instead of timing.
    """

    name: str
    title: str
    settings: tuple[Setting, ...]
    on_cpu: tuple[Setting, ...] | None = None
    quick: tuple[Setting, ...] = ()
    panel: str = "data"
    x: str = "model"
    bars: bool = True
    largest_batch: bool = False

    def chosen(self, device: str, quick: bool) -> tuple[Setting, ...]:
        """The settings for a device."""
        if quick:
            return self.quick
        return self.settings if device == "cuda" or self.on_cpu is None else self.on_cpu


def _settings(models: tuple[str, ...], data: tuple[str, ...], batches: tuple[int, ...]) -> tuple[Setting, ...]:
    return tuple(Setting(m, d, b) for d in data for m in models for b in batches)


_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101")
_VGGS = ("vgg11", "vgg16")
_DEPTHS = ("mlp-2", "mlp-4", "mlp-6", "mlp-8")

GRID = (
    Figure(
        "5",
        "Figure 5: architectures, batches of 32 (mnist stands for Fashion-MNIST too: the shapes are the same)",
        (*_settings(("mlp-2", "cnn", "rnn", "lstm"), ("mnist", "cifar10"), (32,)), Setting("transformer", "imdb", 32)),
        quick=_settings(("mlp-2", "cnn"), ("mnist",), (32,)),
    ),
    Figure(
        "6",
        "Figure 6: batch sizes (the paper ends at 128)",
        _settings(("mlp-2", "cnn", "rnn"), ("mnist",), (16, 32, 64, 128, 256, 512)),
        quick=_settings(("mlp-2",), ("mnist",), (16, 32)),
        panel="model",
        x="batch",
        bars=False,
    ),
    Figure(
        "7",
        "Figure 7: depth of an MLP, batches of 128",
        _settings(_DEPTHS, ("mnist", "cifar10"), (128,)),
        quick=_settings(("mlp-4",), ("mnist",), (128,)),
        x="depth",
        bars=False,
    ),
    Figure(
        "8",
        "Figure 8: ResNet and VGG with frozen batch norm, batches of 20",
        _settings((*_RESNETS, *_VGGS), ("images-64", "images-256"), (20,)),
        on_cpu=_settings(("resnet18", "resnet50", "vgg11"), ("images-64",), (20,)),
    ),
    Figure(
        "9",
        "Figure 9: image sizes, ResNet-18, batches of 32",
        _settings(("resnet18",), ("images-32", "images-64", "images-128", "images-256"), (32,)),
        on_cpu=_settings(("resnet18",), ("images-32", "images-64"), (32,)),
        quick=_settings(("resnet18",), ("images-32",), (2,)),
        panel="model",
        x="image_size",
        bars=False,
    ),
    Figure(
        "largest",
        "Section 6.7: the largest batch in 11 GiB, ResNet-101 at 256 x 256",
        (Setting("resnet101", "images-256", 0),),
        on_cpu=(),
        largest_batch=True,
    ),
    Figure(
        "more",
        "Beyond the paper: group norm, ViT-B/16, GPT-2 small",
        (
            *_settings(("resnet18-groupnorm", "vgg11-groupnorm"), ("images-64",), (20,)),
            Setting("vit-b16", "images-224", 20),
            Setting("gpt2-small", "text", 16),
        ),
        on_cpu=_settings(("resnet18-groupnorm",), ("images-64",), (20,)),
    ),
)


def figures(wanted: list[str] | None = None) -> list[Figure]:
    """The selected figures, or all, in the order of the grid."""
    known = [figure.name for figure in GRID]
    for name in wanted or []:
        if name not in known:
            raise ConfigurationError(f"figure={name!r} is not known: use one of {', '.join(known)}.")
    return [figure for figure in GRID if not wanted or figure.name in wanted]
