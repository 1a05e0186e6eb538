"""The paper's accuracies in percent, by family and method, as a text for each value.

"fails" means that training does not converge. Values marked † come from a scheme with a wrong epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping

Claims = Mapping[tuple[str, str], Mapping[float, str]]

_FAILS = "fails"


def _over(values: tuple[float, ...], *texts: str) -> dict[float, str]:
    return dict(zip(values, texts, strict=True))


_NOISES = (0.0, 0.01, 0.1, 1.0, 2.0)
_MNIST = (7.0, 3.0, 1.0, 0.5, 0.1, 0.05)
_CIFAR = (8.0, 4.0, 2.0)
_NEWS = (7.0, 3.0, 1.0, 0.5, 0.1)
_LAST_REMOVED = "batch norm, the last removed (mod)"

CLAIMS: dict[str, Claims] = {
    "2": {
        ("LeNet-300-100", "no norm"): _over(_NOISES, "98.20", "97.70", "96.98", _FAILS, _FAILS),
        ("LeNet-300-100", "layer norm"): _over(_NOISES, "98.04", "98.00", "98.08", "98.04", "98.03"),
        ("LeNet-300-100", "batch norm"): _over(_NOISES, "98.20", "98.10", "98.07", "98.07", "98.13"),
        ("LeNet-5", "no norm"): _over(_NOISES, "99.20", "98.94", "98.40", _FAILS, _FAILS),
        ("LeNet-5", "layer norm"): _over(_NOISES, "99.16", "99.14", "99.13", "99.21", "99.19"),
        ("LeNet-5", "batch norm"): _over(_NOISES, "99.20", "99.21", "99.18", "99.24", "99.25"),
    },
    "3": {
        ("ResNet-18", "batch norm, hidden layers"): _over(_NOISES, "93.50", "89.05", "89.41", "86.76", "87.83"),
        ("ResNet-18", _LAST_REMOVED): _over(_NOISES, "93.60", "88.65", "88.16", "85.46", "83.95"),
        ("ResNet-18", "batch norm"): _over(_NOISES, "93.55", "93.59", "93.46", "92.72", "92.10"),
        ("VGG-16", "batch norm, hidden layers"): _over(_NOISES, "91.21", "88.89", "84.59", "63.12", _FAILS),
        ("VGG-16", _LAST_REMOVED): _over(_NOISES, "91.18", "88.87", "82.58", "22.58", _FAILS),
        ("VGG-16", "batch norm"): _over(_NOISES, "91.75", "91.69", "91.56", "90.95", "90.35"),
    },
    "4": {
        ("BiLSTM", "no norm"): _over(_NOISES, "89.34", "89.57", "89.01", "66.32", "24.76"),
        ("BiLSTM", "layer norm"): _over(_NOISES, "89.34", "88.87", "88.62", "85.74", "82.41"),
    },
    "5": {
        ("LeNet-5", "no norm"): _over(_MNIST, "97.01", "96.34", "94.11", "91.10", "83.00", "78.96"),
        ("LeNet-5", "layer norm"): _over(_MNIST, "97.35", "97.05", "96.68", "94.81", "87.45", "75.76"),
        ("LeNet-5", "batch norm"): _over(_MNIST, "98.68†", "98.18†", "97.61†", "96.83†", "90.68†", "88.15†"),
    },
    "6": {
        ("TF-tutorial, pretrained", "no norm"): _over(_CIFAR, "73.0", "70.0", "67.0"),
        ("TF-tutorial, pretrained", "layer norm"): _over(_CIFAR, "73.3", "70.6", "67.0"),
        ("TF-tutorial, pretrained", "batch norm"): _over(_CIFAR, "74.1†", "71.2†", "69.8†"),
        ("light VGG, pretrained", "batch norm"): _over(_CIFAR, "79.5†", "79.1†", "77.4†"),
    },
    "7": {
        ("BiLSTM", "no norm"): _over(_NEWS, "83.86", "80.00", "81.14", "77.88", "37.49"),
        ("BiLSTM", "layer norm"): _over(_NEWS, "84.34", "82.51", "82.03", "79.16", "50.09"),
    },
}


def number(claim: str) -> float | None:
    """A claim as a number; None if it is not a number."""
    text = claim.rstrip("†")
    return None if text in ("", _FAILS) else float(text)
