"""The cost of a private step on the host, on a machine with CUDA: `python -m tests.gpu.host`.

Checks first that cached graph data changes no result (changing sizes, TF32, autocast). Then counts launches and times
steps in which the host does not wait for the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from clipwise import make_private
from clipwise.gradients import Memory, by_loop, per_example_gradients
from clipwise.gradients.precision import IEEE, TF32, ieee_arithmetic

DEVICE = torch.device("cuda")


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Small models, with the shape of an input."""
    mlp = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1152, 10)
    )
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    attention = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(32, 10))
    return {
        "mlp": (mlp.to(DEVICE), (32,)),
        "cnn": (cnn.to(DEVICE), (3, 16, 16)),
        "attention": (attention.to(DEVICE), (12, 32)),
    }


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().sum(1)


def check_gradients(name: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Results equal plain autograd at changing sizes, from the first batch until graphs are known."""
    memory, parameters = Memory(), dict(model.named_parameters())
    for b in (6, 6, 6, 9, 6, 3, 9):
        x = torch.randn(b, *shape, device=DEVICE)
        with ieee_arithmetic():
            found = per_example_gradients(losses(model, x), parameters, memory).instantiate(slice(0, b))
            expected = by_loop(losses(model, x), parameters).instantiate(slice(0, b))
        for key, g in expected.items():
            torch.testing.assert_close(found[key], g, rtol=1e-3, atol=1e-4 * float(g.abs().max()), msg=f"{name} {key}")


def check_switches() -> None:
    """Every block sets its arithmetic, inside any other block, and restores the switches."""
    torch.cuda.init()  # cuDNN's switch is ignored before
    for before in ("highest", "high"):
        torch.set_float32_matmul_precision(before)
        allowed = torch.backends.cudnn.allow_tf32
        with torch.autocast("cuda", torch.bfloat16), TF32.products():
            assert not torch.is_autocast_enabled("cuda")
            assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
            with IEEE.products():
                assert torch.get_float32_matmul_precision() == "highest"
                assert not torch.backends.cudnn.allow_tf32
            assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == before
        assert torch.backends.cudnn.allow_tf32 == allowed
    torch.set_float32_matmul_precision("highest")


def step_of(model: nn.Module, shape: tuple[int, ...]) -> tuple[Callable[[], object], Callable[[], object]]:
    data = TensorDataset(torch.randn(64, *shape, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    private = make_private(model, optimizer, data, batch_size=8, sampling="shuffled", noise_multiplier=1.0)
    batches = (batch for _ in iter(int, 1) for batch in private.loader)

    def private_step() -> object:
        (x,) = next(batches)
        return private.step(losses(model, x))

    def plain_step() -> object:
        optimizer.zero_grad()
        losses(model, data.tensors[0][:8]).mean().backward()
        return optimizer.step()

    return private_step, plain_step


def launches(step: Callable[[], object]) -> int:
    """Kernels and copies launched by one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in found.events())


def milliseconds(step: Callable[[], object], repeats: int = 50) -> float:
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e3


def main() -> None:
    torch.manual_seed(0)
    check_switches()
    for name, (model, shape) in networks().items():
        check_gradients(name, model, shape)
        private, plain = step_of(model, shape)
        for _ in range(12):
            private()
        private_ms = milliseconds(private)
        private_launches = launches(private)
        model.zero_grad()
        plain_ms = milliseconds(plain)
        print(
            f"{name}: private {private_ms:.2f} ms, plain {plain_ms:.2f} ms, {private_ms / plain_ms:.1f} times; "
            f"launches {private_launches} and {launches(plain)}"
        )
    print("host: all checks passed")


if __name__ == "__main__":
    main()
