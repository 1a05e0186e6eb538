"""Public statistics on a GPU, without pytest: `python -m tests.gpu.normalization [--rehearse]`.

Compares gradients through the public statistics of convolutional and recurrent networks with those of the same run on
the CPU (cuDNN has no backward pass for a recurrent layer in .eval(), where public rows run). Checks that statistics
follow fused optimizers, whose updates torch does not count. Exit code 1 if anything fails.

--rehearse runs the same on a CPU.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import PerExample, Private, layers, make_private
from tests.gpu.verdicts import Verdicts, failures_of

DEVICE = "cpu" if "--rehearse" in sys.argv[1:] else "cuda"
SIZE, ROWS, CLASSES = 24, 12, 3
TOLERANCE = 1e-4  # relative to the largest gradient, in float32
FUSED: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1, fused=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.1, fused=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 0.1, fused=True),
}


class Recurrent(nn.Module):
    """Recurrent layers of two kinds, followed by batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(16, 6, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.gru(self.lstm(x)[0])[0][:, -1]))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, CLASSES))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "recurrent": (Recurrent, (7, 5)),
    "convolutional": (convolutional, (1, 8, 8)),
}


def run(
    name: str, kind: str, device: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = FUSED["SGD"]
) -> tuple[nn.Module, Private]:
    """Without noise or clipping, on all records."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, statistics = layers.replace_batchnorm(build(), torch.randn(ROWS, *shape), kind)
    model.to(device)
    statistics.refresh()
    data = TensorDataset(torch.randn(SIZE, *shape), torch.arange(SIZE) % CLASSES)
    private = make_private(model, optimizer(model), data, clipping=PerExample(1e9), sampling="full", noise_multiplier=0)
    return model, private


def losses_of_next(model: nn.Module, private: Private, device: str) -> Tensor:
    x, y = (t.to(device) for t in next(iter(private.loader)))
    return F.cross_entropy(model(x), y, reduction="none")


def gradients(name: str, kind: str, device: str) -> dict[str, Tensor]:
    model, private = run(name, kind, device)
    private.backward(losses_of_next(model, private, device))
    return {key: p.grad.detach().cpu() for key, p in model.named_parameters() if p.grad is not None}


def check_gradients() -> Verdicts:
    """Results on the device equal those on the CPU, and differ from those with constant statistics."""
    for name in MODELS:
        for kind in ("public", "public-exact", "self+public"):
            found, expected = gradients(name, kind, DEVICE), gradients(name, kind, "cpu")
            longest = max(float(g.norm()) for g in expected.values())
            for key, gradient in expected.items():
                error = float((found[key] - gradient).norm()) / longest
                yield f"{name}, {kind}, gradient of {key}: off by {error:.2g}", error <= TOLERANCE
        exact, constant = (gradients(name, kind, DEVICE) for kind in ("public-exact", "public"))
        differ = any(not torch.allclose(exact[key], constant[key], rtol=1e-2) for key in exact)
        yield f"{name}: the gradient goes through the statistics", differ


def check_statistics_follow() -> Verdicts:
    """After each update, by any caller of the optimizer, the model has the statistics of its weights."""
    for name in MODELS:
        for title, optimizer in FUSED.items():
            for is_whole_step in (True, False):
                model, private = run(name, "public-exact", DEVICE, optimizer)
                x = torch.randn(4, *MODELS[name][1], device=DEVICE)
                for _ in range(2):
                    losses = losses_of_next(model, private, DEVICE)
                    if is_whole_step:
                        private.step(losses)
                    else:
                        private.backward(losses)
                        private.optimizer.step()
                    other = copy.deepcopy(model)
                    layers.PublicStatistics.of(other).refresh()
                    with torch.no_grad():
                        same = torch.allclose(model(x), other(x), rtol=1e-3, atol=1e-4)
                    yield f"{name}, fused {title}: statistics follow the update", same


def main() -> int:
    if DEVICE == "cuda":
        print(torch.cuda.get_device_name())
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return 1 if failures_of([check_gradients, check_statistics_follow]) else 0


if __name__ == "__main__":
    sys.exit(main())
