"""A random model and its inputs, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.fuzz.blocks import KINDS, Block, Shape
from tests.fuzz.heads import HEADS, VOCABULARY, Embedded, any_head
from tests.fuzz.structures import STRUCTURES, any_structure

WHOLE_MODEL = (
    "float32", "frozen parts", "tied embedding", "input requires gradients", "strided input",
    "layouts remembered", "repeated ids", "size 1", "length equals batch", "batch equals width",
)  # fmt: skip


class Model(nn.Module):
    """A head, structures with and without a nonlinearity, and for a tied model the head's table again."""

    def __init__(self, dice: random.Random, shape: Shape) -> None:
        super().__init__()
        self.head = any_head(dice, shape)
        stages: list[Block] = []
        for _ in range(dice.randint(2, 5)):
            stages += any_structure(dice, stages[-1].out if stages else self.head.out)
        self.stages = nn.ModuleList(stages)
        self.bent = [dice.random() < 0.7 for _ in stages]
        self.tied: nn.Linear | None = None
        if isinstance(self.head, Embedded) and dice.random() < 0.5:
            self.bridge = nn.Linear(stages[-1].out.width, shape.width)
            self.tied = nn.Linear(shape.width, VOCABULARY)
            self.tied.weight = self.head.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(x)
        for stage, bent in zip(self.stages, self.bent, strict=True):
            h = stage(h).tanh() if bent else stage(h)
        return h if self.tied is None else self.tied(self.bridge(h).tanh())


@dataclass(frozen=True)
class Composed:
    """One random model. The last batch is compared; the earlier ones fill the clipper's caches."""

    seed: int
    model: Model
    batches: tuple[Tensor, ...]
    traits: frozenset[str]
    refusable: tuple[str, ...]


def all_traits() -> frozenset[str]:
    """Every trait that a model can have."""
    found = set(WHOLE_MODEL)
    for kind in (*KINDS, *HEADS, *STRUCTURES):
        found |= {*kind.always, *kind.maybe}
    return frozenset(found)


def compose(seed: int) -> Composed:
    """Return the model and inputs of a seed, independent of earlier calls."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, shape = dice.randint(2, 5), Shape(dice.randint(1, 4), dice.choice([1, 2, 2, 3, 4, 4, 5, 6]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model(dice, shape)
    float32, frozen = dice.random() < 0.3, dice.random() < 0.25 and _freeze(dice, model)
    marked, strided, remembered = (dice.random() < 0.2 for _ in range(3))
    sizes = [batch, batch + 1, batch] if remembered else [batch]
    dtype = torch.float32 if float32 else torch.float64
    model.to(dtype)
    batches = []
    for size in sizes:
        x = model.head.draw(size, generator)
        if strided:  # the same values, with gaps between examples
            x = torch.stack([x, x], 1)[:, 0]
        batches.append(x.to(dtype).requires_grad_(marked) if x.is_floating_point() else x)
    whole = {
        "float32": float32,
        "frozen parts": frozen,
        "tied embedding": model.tied is not None,
        "input requires gradients": marked and batches[0].is_floating_point(),
        "strided input": strided,
        "layouts remembered": remembered,
        "repeated ids": _repeats(batches[-1]),
        "size 1": 1 in shape,
        "length equals batch": shape.length == batch,
        "batch equals width": shape.width == batch,
    }
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    return Composed(
        seed,
        model,
        tuple(batches),
        frozenset({t for t, has in whole.items() if has}.union(*(b.traits for b in blocks))),
        tuple(sorted({b.refusable for b in blocks if b.refusable})),
    )


def _freeze(dice: random.Random, model: nn.Module) -> bool:
    """Freeze some parameters, but not all. Returns whether there were enough."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in dice.sample(trainable, len(trainable) // 3):
        p.requires_grad_(False)
    return len(trainable) >= 3


def _repeats(x: Tensor) -> bool:
    """Whether an example has an id twice."""
    return not x.is_floating_point() and any(len(row.unique()) < len(row) for row in x)
