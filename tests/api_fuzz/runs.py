"""Private runs: random models, data, schemes and strategies, and loops with calls in random order."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import (
    Backprop,
    Batch,
    BudgetExhausted,
    ClipwiseError,
    Lipschitz,
    NoisedStatistics,
    PerExample,
    Private,
    Quantile,
    layers,
    make_private,
)
from clipwise.contrib import Adaptive, ByNorm, Multipliers, NormDecay, PublicData, RandomLayer, ReleasedNorms, Sparse
from clipwise.privacy import effective_multiplier
from tests.api_fuzz.outcome import require
from tests.api_fuzz.values import Choice

SCHEMES = ("poisson", "poisson", "truncated-poisson", "fixed-size", "partition", "shuffled", "full")
METHODS = ("auto", "bookkeeping", "reweight", "instantiate", "vmap", "loop")
MOST_CALLS = 8
_HUGE = 1e15  # from 1.8e19 on the square is infinite in float32, and such a record adds nothing: sound, and no oracle's


@dataclass
class Subject:
    """A model with private and public data; `loss` returns one loss per example."""

    kind: str
    model: nn.Module
    dataset: Any
    size: int
    public: TensorDataset
    outputs: Tensor | None = None  # of the last forward pass

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.outputs = self.model(x)
        return F.cross_entropy(self.outputs, y, reduction="none")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).mean(1) @ self.table.weight.T


def _models(kind: str, dtype: torch.dtype) -> nn.Module:
    made: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(4, 3),
        "perceptron": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)),
        "convolution": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)
        ),
        "tied": Tied,
        "bounded": lambda: nn.Sequential(layers.ClipInput(2.0), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        "clipped": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)),
        "normed": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)),
        "twice": lambda: nn.Sequential(shared := nn.Linear(4, 4), nn.Tanh(), shared, nn.Linear(4, 3)),
    }
    return made[kind]().to(dtype)


def subject(choice: Choice) -> Subject:
    kind = choice.dice.choice(
        ("linear", "perceptron", "perceptron", "convolution", "tied", "twice", "bounded", "clipped", "normed")
    )
    dtype = choice.dice.choice((torch.float64, torch.float64, torch.float32))
    size = choice.dice.choice((1, 2, 7, 20))
    model = _models(kind, dtype)
    _prepare(kind, model, choice)
    x, y = _records(kind, size, dtype)
    if choice.is_likely(0.1):
        next(model.parameters()).requires_grad_(False)
    dataset: Any = TensorDataset(x, y)
    if choice.is_likely(0.2):
        dataset = [(a, int(b)) for a, b in zip(x, y, strict=True)]
    if choice.is_likely(0.1) and kind != "tied":
        x[choice.dice.randrange(size)] = choice.dice.choice((math.nan, math.inf, _HUGE))
    dataset = choice.of("dataset", dataset) if choice.is_likely(0.3) else dataset
    return Subject(kind, model, dataset, size, TensorDataset(*_records(kind, 6, dtype)))


def _records(kind: str, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 7, (size, 3)) if kind == "tied" else 2 * torch.randn(size, 4, dtype=dtype)
    return x, torch.randint(0, 3, (size,))


def _prepare(kind: str, model: nn.Module, choice: Choice) -> None:
    """Convert the model as the strategy requires."""
    if kind == "clipped":
        layers.clip_inputs(
            model,
            input_norm=choice.of("input_norm", 1.0, 3.0),
            grad_norm=choice.of("grad_norm", 0.1, 1.0),
            mode=choice.of("mode", "clip", "normalize"),
        )
    elif kind == "normed":
        choice.dice.choice((layers.without_running_statistics, layers.with_released_statistics))(model)


def _policy(choice: Choice, on: Subject) -> Any:
    """A policy of parts from typical norms of layers."""
    public = PublicData(on.public, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"))
    source = choice.of("public", public, public, ReleasedNorms())
    kind = choice.dice.choice((Adaptive, Multipliers, ByNorm))
    named: dict[Any, dict[str, tuple[Any, ...]]] = {
        Adaptive: {"kind": ("enhanced", "zhang")},
        Multipliers: {"kind": ("optimal", "paper")},
        ByNorm: {"groups": (1, 2)},
    }
    return kind(source, **choice.among({"every": ("epoch", 2), **named[kind]}))


def _local(model: nn.Module, batch: Any) -> None:
    """One step of SGD on a copy."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.data -= 0.1 * g


def strategy(choice: Choice, on: Subject) -> Any:
    """Return a random strategy; its constructor may raise."""
    if on.kind == "bounded" and choice.is_likely(0.8):
        return Lipschitz(
            choice.of("max_weight_norm", 1.0, 3.0),
            choice.of("input_norm", 2.0),
            **choice.among(
                {
                    "norm": ("spectral", "frobenius"),
                    "fixed": (True, False),
                    "temperature": (1.0, 2.0),
                    "split": ("optimal", "equal"),
                    "tight": (True, False),
                    "balanced": (True, False),
                }
            ),
        )
    if on.kind == "clipped" and choice.is_likely(0.8):
        return Backprop(**choice.among({"split": ("optimal", "equal")}))
    norm = choice.of("max_norm", 0.1, 1.0, 100.0)
    if choice.is_likely(0.15):
        norm = Quantile(
            **choice.among(
                {"target": (0.3, 0.9), "initial": (0.5, 2.0), "learning_rate": (0.1, 0.5), "count_noise": (0.5, 2.0)}
            )
        )
    elif choice.is_likely(0.1):
        norm = NormDecay(norm, choice.of("factor", 0.5, 0.9), choice.of("every", "epoch", 2))
    options = choice.among(
        {
            "parts": ("all", "layer", "tensor", RandomLayer(choice.of("groups", "layer", "tensor"))),
            "split": ("optimal", "equal"),
        }
    )
    if choice.is_likely(0.05):
        options["sparse"] = Sparse(**choice.among({"every": ("epoch", 8), "within": (0.5, 2.0), "after": (0, 1)}))
    if choice.is_likely(0.1):
        options["parts"] = _policy(choice, on)
    if on.kind == "normed" and choice.is_likely(0.5):
        options["running_statistics"] = NoisedStatistics(
            **choice.among({"max_norm": (0.5, 2.0), "momentum": (0.1, 1.0), "share": (0.1, 0.5)})
        )
    if choice.is_likely(0.05):
        return Batch(norm, local_update=choice.of("local_update", _local), **options)
    if choice.is_likely(0.25):
        return Batch(norm, **options, **choice.among({"microbatches": (1, 2, 4)}))
    return PerExample(norm, **options, **choice.among({"mode": ("clip", "normalize"), "method": METHODS}))


def _ridge(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters() if p.requires_grad), torch.zeros(()))


def begin(choice: Choice, on: Subject) -> Private:
    sampling = choice.of("sampling", *SCHEMES)
    options = choice.among(
        {
            "delta": (1e-5, 1e-3),
            "adjacency": (None, "zero-out", "replace-one"),
            "max_physical_batch_size": (None, 1, 3),
            "augmentation_multiplicity": (1, 2),
            "seed": (0, 7),  # so that a case can be repeated
            "probe_independence": (True, False),
            "epochs": (1, 3),
            "noise": ("standard", "secure"),
            "ema": (None, 0.5, 0.99),
            "penalty": (None, _ridge),
        },
        least=("seed",),
    )
    if not (isinstance(sampling, str) and sampling == "full"):
        if choice.is_likely(0.7):
            options["batch_size"] = choice.of("batch_size", 1, 2, 5)
        else:
            options["sample_rate"] = choice.of("sample_rate", 0.1, 0.5, 1.0)
    if choice.is_likely(0.05):
        options |= {"epsilon": choice.of("epsilon", 0.5, 8.0), "delta": 1e-5, "epochs": 1}
    else:
        options["noise_multiplier"] = choice.of("noise_multiplier", 0, 0, 0.5, 1.0, 3.0)
    if choice.is_likely(0.05):
        options["group"] = choice.of("group", [i % 3 for i in range(on.size)])
    rate = 0.01
    optimizer: Any = torch.optim.SGD(on.model.parameters(), lr=rate)
    return make_private(on.model, optimizer, on.dataset, clipping=strategy(choice, on), sampling=sampling, **options)


class Loop:
    """Makes calls in random order, and tracks the expected results."""

    def __init__(self, choice: Choice, on: Subject, private: Private) -> None:
        self.choice, self.on, self.private = choice, on, private
        self.released, self.epsilon = 0, 0.0
        self.batches = iter(private.loader.pieces())
        self.batch: Any = None
        self.refusals: list[str] = []

    def play(self) -> None:
        moves = [self.draw, self.step, self.draw, self.step, self.draw, self.step, self.awkward_step]
        moves += [self.look, self.again, self.save_and_load, self.close, self.by_hand]
        for _ in range(self.choice.dice.randint(1, MOST_CALLS)):
            move = self.choice.dice.choice(moves)
            try:
                move()
            except BudgetExhausted:
                self.refusals.append("BudgetExhausted")
            except ClipwiseError as refusal:
                require(len(str(refusal)) > 20, f"a message that explains nothing: {refusal}")
                self.refusals.append(type(refusal).__name__)
            except StopIteration:
                self.batches = iter(self.private.loader.pieces())
            require(self.private.steps == self.released, f"{self.released} releases, and {self.private.steps} counted")

    def draw(self) -> None:
        self.batch = next(self.batches)

    def losses(self) -> Tensor:
        if self.batch is None:
            self.draw()
        return self.on.loss(*self.batch)

    def step(self) -> None:
        losses = self.losses()
        before = [p.detach().clone() for p in self.on.model.parameters()]
        model = copy.deepcopy(self.on.model)
        if not self._made(losses):
            return
        self.released += 1
        require(all(bool(p.isfinite().all()) for p in self.on.model.parameters()), "a parameter is not finite")
        if self.private.noise_multiplier == 0:
            self._require_right(model, before)

    def _made(self, losses: Tensor) -> bool:
        if getattr(self.private._context.strategy, "local_update", None) is not None and self.choice.is_likely(0.8):
            return self.private.step_local_update(self.batch)
        return self.private.step(losses, self.on.outputs)

    def by_hand(self) -> None:
        if self.private.backward(self.losses(), self.on.outputs):
            self.released += 1
            self.private.optimizer.step()
            self.private.optimizer.zero_grad()

    def awkward_step(self) -> None:
        losses = self.losses()
        spoil: Callable[[Tensor], Any] = self.choice.dice.choice(
            [
                lambda x: x.mean(),
                lambda x: x.detach(),
                lambda x: x[1:],
                lambda x: x[:, None],
                lambda x: x.tolist(),
                lambda x: None if x.dim() and len(x) else x.tolist(),  # None is for an empty batch
                lambda x: x - x.mean(),
                lambda x: torch.cat([x, x]),
                lambda x: x.sum() * torch.ones_like(x),
            ]
        )
        self.released += self.private.step(spoil(losses), self.on.outputs)

    def look(self) -> None:
        parts = self.private.parts()
        if self.private.noise_multiplier > 0:
            z = effective_multiplier(parts)
            require(
                math.isclose(z, self.private.noise_multiplier, rel_tol=1e-6),
                f"all parts together have multiplier {z}, and the run {self.private.noise_multiplier}",
            )
        names = [name for part in parts for name in part.parameters]
        trained = [name for name, p in self.on.model.named_parameters() if p.requires_grad]
        require(sorted(names) == sorted(trained), "the parts do not hold every parameter once")
        if self.choice.is_likely(0.2):
            spent = self.private.spent(self.choice.of("delta", None, 1e-5, 1e-3))
            require(spent.steps == self.released, "spent() counts otherwise")
            require(spent.epsilon >= 0, f"epsilon is {spent.epsilon}")
            if spent.delta == self.private._context.plan.delta:
                require(spent.epsilon >= self.epsilon - 1e-9, "epsilon has shrunk")
                self.epsilon = spent.epsilon

    def again(self) -> None:
        self.batches, self.batch = iter(self.private.loader.pieces()), None

    def save_and_load(self) -> None:
        state = self.private.state_dict()
        require(state["position"] == self.released, "a checkpoint counts otherwise")
        if self.choice.is_likely(0.5):
            key = self.choice.dice.choice(list(state))
            state[key] = self.choice.of(key, None, state[key])
        self.private.load_state_dict(state)
        self.again()

    def close(self) -> None:
        if self.choice.is_likely(0.2):
            self.private.close()

    def _require_right(self, model: nn.Module, before: list[Tensor]) -> None:
        """Compare a step without noise with the clipped sum of one forward pass per example, over a constant."""
        clipping = self.private._context.strategy
        plain = isinstance(clipping, PerExample) and isinstance(clipping.max_norm, (int, float))
        if not (plain and clipping.parts == "all" and clipping.mode == "clip" and self.private.views == 1):
            return
        if self.private.loader.max_physical_batch_size is not None or clipping.sparse is not None:
            return
        if self.private._context.plan.penalty is not None or self.on.kind in ("clipped", "normed"):
            return  # more than the clipped sum is in the gradient, or a forward pass is more than a function
        model = model.double()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for _, p in named]
        for i in range(len(self.batch[1])):
            x, y = (t[i : i + 1].detach() for t in self.batch)
            loss = F.cross_entropy(model(x.double() if x.is_floating_point() else x), y)
            found = torch.autograd.grad(loss, [p for _, p in named])
            norm = float(torch.cat([g.flatten() for g in found]).norm())
            if not math.isfinite(norm):
                continue
            weight = min(1.0, float(clipping.max_norm) / norm) if norm else 1.0
            for t, g in zip(total, found, strict=True):
                t += weight * g
        wanted = {name: t / self.private.divisor for (name, _), t in zip(named, total, strict=True)}
        for name, p in self.on.model.named_parameters():
            if p.requires_grad and p.grad is not None:
                near = torch.allclose(p.grad.double(), wanted[name], rtol=1e-4, atol=1e-4 * float(clipping.max_norm))
                require(near, f"the gradient of {name!r} is not that of a forward pass for each example")


def play(choice: Choice) -> list[str]:
    """Make a run and use it."""
    on = subject(choice)
    private = begin(choice, on)
    if "dataset" in choice.spoiled:
        return []  # the loss below does not support such records
    loop = Loop(choice, on, private)
    loop.play()
    return loop.refusals
