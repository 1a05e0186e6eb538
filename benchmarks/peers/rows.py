"""The rows of the table, on CUDA and on the CPU, with their targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.methods import AUTO
from benchmarks.peers.targets import Target, targets, targets_of_small, targets_on_cuda, targets_over_noise
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


def _partial_rows(name: str, title: str, data: str, batch: int) -> tuple[Row, ...]:
    """A transformer with few trained parameters, next to plain training of the same parameters."""
    return tuple(
        Row(f"{name}-{part}", f"{title}, only {part}", Setting(name, data, batch, part), (Target(AUTO, 1.1),))
        for part in ("biases", "lora", "head")
    )


def _in_both(name: str, title: str, setting: Setting, *limits: float) -> tuple[Row, ...]:
    """A row in bfloat16 autocast and one in tf32, with limits of time (bfloat16, tf32) and memory."""
    in_bf16, in_tf32, memory = limits
    return (
        Row(f"{name}-bf16", f"{title}, bf16", replace(setting, bf16=True), targets_on_cuda(in_bf16, memory)),
        Row(name, f"{title}, tf32", setting, targets_on_cuda(in_tf32, memory)),
    )


def _small(name: str, title: str, model: str) -> Row:
    return Row(name, f"{title}, B=512, tf32", Setting(model, "mnist", 512), targets_of_small(2.0))


def _partial_on_cuda(name: str, title: str, setting: Setting) -> Row:
    return Row(f"{name}-bf16", f"{title}, bf16", replace(setting, bf16=True), targets_on_cuda(1.1, 1.1))


_RECURRENT = (("rnn", "RNN"), ("lstm", "LSTM"))
_TEXTS, _IMAGES = Setting("gpt2-small", "text-256", 32), Setting("vit-b16", "images-224", 128)
_WIDE = Setting("wrn-16-4", "cifar10", 256, views=4)
_LIMITS, _CONVOLUTIONAL = (1.35, 1.25, 1.3), (1.6, 1.6, 1.5)

ON_CUDA = (
    *_in_both("gpt2-256", "GPT-2 small, T=256, B=32", _TEXTS, *_LIMITS),
    *_in_both("gpt2-1024", "GPT-2 small, T=1024, B=16", Setting("gpt2-small", "text-1024", 16), *_LIMITS),
    *_in_both("vit-b16", "ViT-B/16, B=128", _IMAGES, *_LIMITS),
    *_in_both("transformer", "one-block Transformer, B=512", Setting("transformer", "imdb", 512), *_LIMITS),
    *_in_both("resnet18", "ResNet-18 GN, B=512", Setting("resnet18-groupnorm-32", "cifar10", 512), *_CONVOLUTIONAL),
    *_in_both("vgg11", "VGG-11 GN, B=512", Setting("vgg11-groupnorm-32", "cifar10", 512), *_CONVOLUTIONAL),
    *_in_both("wrn-16-4", "WRN-16-4 standardized, B=256, 4 views", _WIDE, *_CONVOLUTIONAL),
    _small("cnn", "CNN", "cnn"),
    _small("mlp", "MLP", "mlp-2"),
    _small("mlp-4x4096", "4x4096 MLP", "mlp-4x4096"),
    *(_small(name, title, name) for name, title in _RECURRENT),
    _partial_on_cuda("gpt2-lora", "GPT-2 small, T=256, B=32, only lora", replace(_TEXTS, trained="lora")),
    _partial_on_cuda(
        "gpt2-head", "GPT-2 small, T=256, B=32, only head", replace(_TEXTS, model="gpt2-small-untied", trained="head")
    ),
    _partial_on_cuda("vit-b16-lora", "ViT-B/16, B=128, only lora", replace(_IMAGES, trained="lora")),
    _partial_on_cuda("vit-b16-head", "ViT-B/16, B=128, only head", replace(_IMAGES, trained="head")),
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
    *_partial_rows("vit-tiny", "ViT-tiny at 32 x 32, B=32", "images-32", 32),
)
# A check that the suite runs.
QUICK = (
    Row("mlp", "MLP, B=32", Setting("mlp-2", "mnist", 32), targets_over_noise(1.2)),
    Row("cnn", "CNN, B=8", Setting("cnn", "mnist", 8), targets_over_noise(1.2)),
    _partial_rows("vit-tiny", "ViT-tiny at 32 x 32, B=2", "images-32", 2)[1],
    _in_both("transformer", "one-block Transformer, T=8, B=2", Setting("transformer", "imdb-8", 2), *_LIMITS)[0],
    _in_both("wrn-16-4", "WRN-16-4 standardized, B=2, 2 views", replace(_WIDE, batch=2, views=2), *_CONVOLUTIONAL)[1],
)


def rows_for(device: str, *, quick: bool = False, wanted: list[str] | None = None) -> list[Row]:
    """The selected rows of a device, or all, in the order of the table."""
    rows = QUICK if quick else ON_CUDA if device == "cuda" else ON_CPU
    known = [row.name for row in rows]
    for name in wanted or []:
        if name not in known:
            raise ConfigurationError(f"row={name!r} is not known on this device: use one of {', '.join(known)}.")
    return [row for row in rows if not wanted or row.name in wanted]
