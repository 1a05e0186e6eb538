"""Random small networks of every kind with bounds, and a search for their largest gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from clipwise.layers.bounded import BoundedGroupNorm, BoundedLayerNorm, ClipInput
from clipwise.lipschitz.bounds import Bounds, bounds_of
from clipwise.lipschitz.trace import trace

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.GELU,
    lambda: nn.GELU(approximate="tanh"),
    nn.SiLU,
    nn.Mish,
    nn.SELU,
    nn.Hardswish,
    lambda: nn.ELU(1.7),
    lambda: nn.ELU(-1.5),
    lambda: nn.Softplus(beta=-1.5),
    lambda: nn.Softplus(beta=3.0, threshold=-2.0),
    lambda: nn.LeakyReLU(-2.0),
    lambda: nn.Hardtanh(1.0, 3.0),
    lambda: nn.LeakyReLU(0.3),
    lambda: nn.LeakyReLU(1.8),
    nn.Hardsigmoid,
    nn.LogSigmoid,
    nn.Softsign,
    nn.Hardtanh,
    nn.ReLU6,
    lambda: nn.Dropout(0.4),
]


class Residual(nn.Module):
    """x + F(x), a concatenation of F(x) and G(x), or x times a gate."""

    def __init__(self, kind: str, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, left, right

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sum":
            return x + self.left(x)
        if self.kind == "join":
            return torch.cat([self.left(x), self.right(x)], dim=1)
        if self.kind == "shared":
            return self.left(self.left(x)) - x / 2
        if self.kind == "twice":
            return x + x
        return self.left(x) * torch.sigmoid(self.right(x))


class Shifted(nn.Module):
    """A parameter used outside a layer, broadcast over the positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def dense(dice: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    width, positions = dice.randint(1, 6), dice.choice([0, 0, 1, 3])
    layers: list[nn.Module] = []
    start = now = width
    for _ in range(dice.randint(1, 3)):
        wide = dice.randint(1, 6)
        layers += [nn.Linear(now, wide, bias=dice.random() < 0.5), dice.choice(ACTIVATIONS)()]
        now = wide
        if dice.random() < 0.3:
            kind = dice.choice(["sum", "join", "shared", "gate", "twice"])
            left, right = nn.Linear(now, now), nn.Linear(now, now, bias=False)
            layers.append(Residual(kind, left, right))
            if kind == "join" and not positions:
                now *= 2
        if dice.random() < 0.2 and now > 1:
            layers.append(BoundedLayerNorm(now, alpha=dice.choice([0.1, 1.0])))
        if dice.random() < 0.2:
            layers.append(Shifted(now))
    joined = 2 ** sum(isinstance(m, Residual) and m.kind == "join" for m in layers) if positions else 1
    layers += [nn.Flatten(), nn.Linear(now * max(positions, 1) * joined, dice.randint(1, 4))]
    return nn.Sequential(*layers), (positions, start) if positions else (start,)


def convolutional(dice: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """Convolutions in one to three dimensions, norms and pooling."""
    dims = dice.choice([1, 2, 2, 3])
    groups = dice.choice([1, 1, 2])
    now, size = groups * dice.randint(1, 2), dice.randint(4, 6)
    shape = (now, *[size] * dims)
    layers: list[nn.Module] = []
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    x = torch.zeros(1, *shape)
    for _ in range(dice.randint(1, 2)):
        wide = groups * dice.randint(1, 2)
        same = dice.random() < 0.2
        layers.append(
            conv(
                now,
                wide,
                dice.randint(1, 3),
                stride=1 if same else dice.choice([1, 1, 2, 3]),
                padding="same" if same else dice.randint(0, 2),
                dilation=dice.choice([1, 1, 2]),
                groups=groups,
                bias=dice.random() < 0.5,
            )
        )
        now = wide
        layers.append(dice.choice(ACTIVATIONS[:-1])())
        if dice.random() < 0.3:
            layers.append(BoundedGroupNorm(groups, now, alpha=dice.choice([0.1, 1.0])))
        layers.append(_pool(dice, dims))
        if dice.random() < 0.3:
            layers.append(Residual("join", conv(now, 1, 1), conv(now, 1, 1, bias=False)))
            now = 2
            groups = 1
        try:
            x = nn.Sequential(*layers).eval()(torch.zeros(1, *shape))
        except RuntimeError:  # the image is empty
            return convolutional(dice)
    if x.numel() == 0:
        return convolutional(dice)
    layers += [nn.Flatten(), nn.Linear(x.flatten(1).shape[1], 3)]
    return nn.Sequential(*layers), shape


def _pool(dice: random.Random, dims: int) -> nn.Module:
    kind = dice.choice(["none", "max", "average", "adaptive max", "adaptive average"])
    k, s = dice.randint(1, 3), dice.randint(1, 2)
    padding, ceil = dice.randint(0, k // 2), dice.random() < 0.5
    if kind == "max":
        return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1](k, s, padding, ceil_mode=ceil)
    if kind == "average":
        pool = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dims - 1]
        other = {"divisor_override": 2} if dims > 1 and dice.random() < 0.3 else {}
        return pool(k, s, padding, ceil_mode=ceil, count_include_pad=dice.random() < 0.5, **other)
    if kind == "adaptive max":
        return (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[dims - 1](k)
    if kind == "adaptive average":
        return (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1](k)
    return nn.Identity()


def table(dice: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    width, length = dice.randint(1, 4), dice.randint(1, 4)
    return nn.Sequential(nn.Embedding(3, width), Mean(), nn.Tanh(), nn.Linear(width, 2)), (length,)


FAMILIES = {"dense": dense, "convolutional": convolutional, "table": table}


def draw(family: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[int, ...]]:
    """A random network with random weight scales and clipped inputs."""
    dice = random.Random(f"{family}/{seed}")
    torch.manual_seed(seed)
    inner, shape = FAMILIES[family](dice)
    with torch.no_grad():
        for p in inner.parameters():
            p.mul_(dice.choice([0.3, 1.0, 1.0, 3.0]))
    if family == "table":
        return inner.to(dtype), shape
    return nn.Sequential(ClipInput(dice.choice([0.5, 1.0, 4.0])), *inner).to(dtype), shape


def ratios(model: nn.Module, shape: tuple[int, ...], seed: int, ascent: int = 0) -> dict[str, float]:
    """|gradient| / bound of each parameter, the largest over random examples and some steps of gradient ascent."""
    bounds = bounds_of(trace(model, shape), 1.0)
    best = dict.fromkeys(bounds.sensitivities, 0.0)
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for attempt in range(3):
        if isinstance(model[0], nn.Embedding):  # type: ignore[index]
            x = torch.randint(0, 3, (1, *shape), generator=generator)
            if attempt == 0:
                x.fill_(1)
        else:
            x = torch.randn(1, *shape, generator=generator).to(dtype) * 10.0 ** (attempt * 3 - 3)
        outputs = model(x)
        y = torch.randn(outputs.shape, generator=generator).to(dtype)
        for step in range(ascent + 1):
            found, moved = _gradients(model, x, y, climb=step < ascent)
            _note(best, found, bounds)
            if moved is None:
                break
            x, y = moved
    return best


def _gradients(
    model: nn.Module, x: Tensor, y: Tensor, climb: bool
) -> tuple[dict[str, float], tuple[Tensor, Tensor] | None]:
    """The norms for the output gradient y / |y|, and the next example of the ascent."""
    climb = climb and x.is_floating_point()
    x, y = x.detach().requires_grad_(climb), y.detach().requires_grad_(climb)
    rng = torch.random.get_rng_state()
    direction = y / y.norm()
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(
        (model(x) * direction).sum(), list(parameters.values()), create_graph=climb, allow_unused=True
    )
    norms = {name: g.norm() for name, g in zip(parameters, grads, strict=True) if g is not None}
    found = {name: float(n.detach()) for name, n in norms.items()}
    if not climb:
        return found, None
    torch.random.set_rng_state(rng)
    goal = sum(n.clamp(min=1e-12).log() for n in norms.values())
    if not (isinstance(goal, Tensor) and goal.requires_grad):
        return found, None
    try:
        up_x, up_y = torch.autograd.grad(goal, (x, y), allow_unused=True)
    except RuntimeError:  # some functions have no second derivative in torch
        return found, None
    moved_x = x if up_x is None else x + 0.1 * x.norm() * up_x / up_x.norm().clamp(min=1e-12)
    moved_y = y if up_y is None else y + 0.1 * y.norm() * up_y / up_y.norm().clamp(min=1e-12)
    if not (bool(torch.isfinite(moved_x).all()) and bool(torch.isfinite(moved_y).all())):
        return found, None
    return found, (moved_x.detach(), moved_y.detach())


def _note(best: dict[str, float], found: dict[str, float], bounds: Bounds) -> None:
    for name, norm in found.items():
        bound = bounds.sensitivities[name]
        ratio = norm / bound if bound > 0 else (math.inf if norm > 0 else 0.0)
        best[name] = max(best[name], ratio)
