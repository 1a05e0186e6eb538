"""The rows of the table, on CUDA and on the CPU, with their targets."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.methods import AUTO, COMPILED
from benchmarks.peers.targets import Target, targets, targets_over_noise
from benchmarks.workload import Setting
from clipwise.errors import ConfigurationError


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        name: its name for `--row`.
        title: its name in the table.
        setting: network, data and batch size; optimizer and layout are chosen by measuring.
        targets: the targets.
    """

    name: str
    title: str
    setting: Setting
    targets: tuple[Target, ...]


def _partial_rows(name: str, title: str, data: str, batch: int, *columns: str) -> tuple[Row, ...]:
    """A transformer with few trained parameters, next to plain training of the same parameters."""
    limits = tuple(Target(column, 1.1) for column in columns)
    return tuple(
        Row(f"{name}-{part}", f"{title}, only {part}", Setting(name, data, batch, part), limits)
        for part in ("biases", "lora", "head")
    )


_RECURRENT = (("rnn", "RNN"), ("lstm", "LSTM"))

ON_CUDA = (
    Row("gpt2-256", "GPT-2 small, T=256, B=32", Setting("gpt2-small", "text-256", 32), targets(1.1, 1.4)),
    Row("gpt2-1024", "GPT-2 small, T=1024, B=16", Setting("gpt2-small", "text-1024", 16), targets(1.1, 1.4)),
    Row("vit-b16", "ViT-B/16, B=128", Setting("vit-b16", "images-224", 128), targets(1.1, 1.4)),
    Row("transformer", "one-block Transformer, B=512", Setting("transformer", "imdb", 512), targets(1.15, 1.4)),
    Row("resnet18", "ResNet-18 GN, B=512", Setting("resnet18-groupnorm-32", "cifar10", 512), targets(1.4, 1.5)),
    Row("vgg11", "VGG-11 GN, B=512", Setting("vgg11-groupnorm-32", "cifar10", 512), targets(1.4, 1.5)),
    Row("cnn", "CNN, B=512", Setting("cnn", "mnist", 512), targets_over_noise(1.1, 1.3)),
    Row("mlp", "MLP, B=512", Setting("mlp-2", "mnist", 512), targets_over_noise(1.1, 1.3)),
    Row("mlp-4x4096", "4x4096 MLP, B=512", Setting("mlp-4x4096", "mnist", 512), targets_over_noise(1.1, 1.3)),
    *(Row(name, f"{title}, B=128", Setting(name, "mnist", 128), targets(2.0, 1.5)) for name, title in _RECURRENT),
    *_partial_rows("vit-b16", "ViT-B/16, B=128", "images-224", 128, AUTO, COMPILED),
)
ON_CPU = (
    Row("gpt2-mini", "GPT-2, 4 x 256, T=128, B=8", Setting("gpt2-mini", "text-128", 8), targets(1.5)),
    Row("vit-tiny", "ViT-tiny at 32 x 32, B=32", Setting("vit-tiny", "images-32", 32), targets(1.3)),
    Row("transformer", "one-block Transformer, B=32", Setting("transformer", "imdb", 32), targets(1.4)),
    Row("resnet18", "ResNet-18 GN, B=64", Setting("resnet18-groupnorm-32", "cifar10", 64), targets(1.5)),
    Row("vgg11", "VGG-11 GN, B=128", Setting("vgg11-groupnorm-32", "cifar10", 128), targets(1.5)),
    Row("cnn", "CNN, B=512", Setting("cnn", "mnist", 512), targets_over_noise(1.2)),
    Row("mlp", "MLP, B=512", Setting("mlp-2", "mnist", 512), targets_over_noise(1.2)),
    Row("mlp-4x1024", "4x1024 MLP, B=512", Setting("mlp-4x1024", "mnist", 512), targets_over_noise(1.2)),
    *(Row(name, f"{title}, B=128", Setting(name, "mnist", 128), targets(2.0)) for name, title in _RECURRENT),
    *_partial_rows("vit-tiny", "ViT-tiny at 32 x 32, B=32", "images-32", 32, AUTO),
)
# A check that the suite runs.
QUICK = (
    Row("mlp", "MLP, B=32", Setting("mlp-2", "mnist", 32), targets_over_noise(1.2)),
    Row("cnn", "CNN, B=8", Setting("cnn", "mnist", 8), targets_over_noise(1.2)),
    _partial_rows("vit-tiny", "ViT-tiny at 32 x 32, B=2", "images-32", 2, AUTO)[1],
)


def rows_for(device: str, *, quick: bool = False, wanted: list[str] | None = None) -> list[Row]:
    """The selected rows of a device, or all, in the order of the table."""
    rows = QUICK if quick else ON_CUDA if device == "cuda" else ON_CPU
    known = [row.name for row in rows]
    for name in wanted or []:
        if name not in known:
            raise ConfigurationError(f"row={name!r} is not known on this device: use one of {', '.join(known)}.")
    return [row for row in rows if not wanted or row.name in wanted]
