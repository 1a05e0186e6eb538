"""The ways to make a step that are compared. A step is everything from drawing the batch to the update.

clipwise's own methods run through `make_private`: the batch is drawn (a shuffled epoch, as in the paper, so
that all batches have one size), clipped, noised, charged to a ledger on disk, and the optimizer steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from clipwise.bench.peer import opacus_steps
from clipwise.bench.workload import Workload, losses_of
from clipwise.clipping import PerExample
from clipwise.engine import make_private
from clipwise.errors import ConfigurationError
from clipwise.noise import NoiseKey, gaussian

MAX_NORM = 1.0
NOISE_MULTIPLIER = 1.0
REFERENCE = "non-private"
ONE_BY_ONE = "one by one"

Step = Callable[[], None]
Method = Callable[[Workload], AbstractContextManager[Step]]


@contextmanager
def _non_private(workload: Workload) -> Iterator[Step]:
    """An ordinary step on the mean loss."""
    optimizer, batches = workload.optimizer(), workload.batches()

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        torch.autograd.backward(losses_of(workload.model(x), y).mean())
        optimizer.step()

    yield step


@contextmanager
def _floor(workload: Workload) -> Iterator[Step]:
    """An ordinary step plus clipwise's own noise: less than this no private step can cost.

    It clips nothing, so it is not private.
    """
    optimizer, batches, key = workload.optimizer(), workload.batches(), NoiseKey.fresh()
    trained = [p for p in workload.model.parameters() if p.requires_grad]

    def step() -> None:
        x, y = next(batches)
        total = torch.autograd.grad(losses_of(workload.model(x), y).sum(), trained)
        _write_noised(trained, total, key, workload.batch)
        optimizer.step()

    yield step


@contextmanager
def _one_by_one(workload: Workload) -> Iterator[Step]:
    """The naive way: each example goes forward and back alone, is clipped and added; then noise.

    `PerExample(method="loop")` is another thing: it goes back through the graph of the whole batch once for
    each example, which costs the square of the batch.
    """
    optimizer, batches, key = workload.optimizer(), workload.batches(), NoiseKey.fresh()
    trained = [p for p in workload.model.parameters() if p.requires_grad]

    def step() -> None:
        x, y = next(batches)
        total = [torch.zeros_like(p) for p in trained]
        for i in range(len(x)):
            loss = losses_of(workload.model(x[i : i + 1]), y[i : i + 1]).sum()
            gradient = torch.autograd.grad(loss, trained)
            norm = torch.stack([g.norm() for g in gradient]).norm()
            factor = (MAX_NORM / norm).clamp(max=1)
            torch._foreach_add_(total, torch._foreach_mul(gradient, factor))
        _write_noised(trained, total, key, workload.batch)
        optimizer.step()

    yield step


@contextmanager
def _private(workload: Workload, how: str) -> Iterator[Step]:
    """A private step by one of `PerExample`'s methods."""
    with (
        TemporaryDirectory() as folder,
        make_private(
            workload.model,
            workload.optimizer(),
            workload.dataset,
            batch_size=workload.batch,
            sampling="shuffled",
            clipping=PerExample(max_norm=MAX_NORM, method=how),
            noise_multiplier=NOISE_MULTIPLIER,
            ledger=Path(folder) / "ledger",
        ) as private,
    ):
        batches = chain.from_iterable(repeat(private.loader))

        def step() -> None:
            x, y = next(batches)
            private.step(losses_of(workload.model(x), y))

        yield step


def _write_noised(
    trained: Sequence[nn.Parameter], total: Sequence[Tensor], key: NoiseKey, batch: int
) -> None:
    """(sum + noise) / batch becomes `.grad`, as in the engine."""
    sizes = [p.numel() for p in trained]
    std = NOISE_MULTIPLIER * MAX_NORM
    noise = gaussian(key.derive("noise"), sum(sizes), std, device=total[0].device)
    key.advance()
    for p, own, part in zip(trained, total, torch.split(noise, sizes), strict=True):
        p.grad = (part.view_as(p) + own).div_(batch)


_METHODS: dict[str, Method] = {
    REFERENCE: _non_private,
    "non-private + noise": _floor,
    **{how: partial(_private, how=how) for how in ("bookkeeping", "reweight", "instantiate", "vmap", "loop")},
    ONE_BY_ONE: _one_by_one,
    **{
        f"opacus {mode}": partial(
            opacus_steps, mode=mode, max_norm=MAX_NORM, noise_multiplier=NOISE_MULTIPLIER
        )
        for mode in ("hooks", "ghost")
    },
}
# The first steps look at the graphs and check the rules and the losses: they are not what a run costs.
_SETTLING = {"bookkeeping": 6, "reweight": 6, "instantiate": 6}
PAPER_NAMES = {"reweight": "ReweightGP", "vmap": "multiLoss", ONE_BY_ONE: "nxBP"}


def all_methods() -> list[str]:
    """Every method, in the order of tables."""
    return list(_METHODS)


def available_methods(wanted: list[str] | None = None) -> list[str]:
    """The wanted methods, or all of them; Opacus only where it is installed."""
    for name in wanted or []:
        if name not in _METHODS:
            choices = ", ".join(map(repr, _METHODS))
            raise ConfigurationError(f"method={name!r} is not known: use one of {choices}.")
    has_opacus = importlib.util.find_spec("opacus") is not None
    return [
        name
        for name in _METHODS
        if (not wanted or name in wanted) and (has_opacus or not name.startswith("opacus"))
    ]


def steps_by(method: str, workload: Workload) -> AbstractContextManager[Step]:
    """A context that gives the function to call for each step."""
    return _METHODS[method](workload)


def settling_steps(method: str) -> int:
    """How many steps of a method are not counted."""
    return _SETTLING.get(method, 2)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
