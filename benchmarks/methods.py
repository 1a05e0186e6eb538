"""The compared methods. A step is everything from drawing the batch to the update.

clipwise's methods run through `make_private`: draw a batch (from a shuffled epoch, as in the paper, so that all
batches have one size), clip, add noise, write the ledger to disk, and step the optimizer.
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

from benchmarks.graphs import compiled_steps, graphed_steps
from benchmarks.peer import opacus_steps
from benchmarks.workload import Workload
from clipwise.clipping import PerExample
from clipwise.engine.inductor import is_available
from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
from clipwise.errors import ConfigurationError
from clipwise.noise.gaussian import gaussian
from clipwise.noise.key import NoiseKey

MAX_NORM = 1.0
NOISE_MULTIPLIER = 1.0
REFERENCE = "non-private"
PLAIN_AND_NOISE = "non-private + noise"
GRAPHED = "non-private graphed"
PLAIN_COMPILED = "non-private compiled"
AUTO, COMPILED, INDUCTOR, REWEIGHT = "auto", "compiled", "inductor", "reweight"
ONE_BY_ONE = "one by one"
OPACUS = ("opacus hooks", "opacus ghost")

Step = Callable[[], None]
Method = Callable[[Workload], AbstractContextManager[Step]]


@contextmanager
def _non_private(workload: Workload) -> Iterator[Step]:
    """An ordinary step on the mean loss."""
    optimizer, batches = workload.optimizer(), workload.batches()

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        torch.autograd.backward(workload.losses(x, y).mean())
        optimizer.step()

    yield step


@contextmanager
def _plain_compiled(workload: Workload) -> Iterator[Step]:
    """An ordinary step whose forward and backward pass `torch.compile` has compiled."""
    torch._dynamo.reset()  # after a few models it would no longer compile this function
    optimizer, batches = workload.optimizer(), workload.batches()
    loss = torch.compile(lambda x, y: workload.losses(x, y).mean(), dynamic=False)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        torch.autograd.backward(loss(x, y))
        optimizer.step()

    yield step


@contextmanager
def _plain_and_noise(workload: Workload) -> Iterator[Step]:
    """A non-private step plus clipwise's noise, added in one pass: a lower limit of the cost of a private step.

    It does not clip, so it is not private.
    """
    optimizer, batches, key = workload.optimizer(), workload.batches(), NoiseKey.fresh()
    trained = [p for p in workload.model.parameters() if p.requires_grad]

    def step() -> None:
        x, y = next(batches)
        gradients = torch.autograd.grad(workload.losses(x, y).mean(), trained)
        noised = _noise_like(trained, key, workload.batch)
        torch._foreach_add_(noised, gradients)
        for p, gradient in zip(trained, noised, strict=True):
            p.grad = gradient
        optimizer.step()

    yield step


@contextmanager
def _one_by_one(workload: Workload) -> Iterator[Step]:
    """The naive method: forward, backward and clip each example alone, then add noise.

    `PerExample(method="loop")` differs: it runs backward through the graph of the whole batch once for each
    example, which costs the square of the batch size.
    """
    optimizer, batches, key = workload.optimizer(), workload.batches(), NoiseKey.fresh()
    trained = [p for p in workload.model.parameters() if p.requires_grad]

    def step() -> None:
        x, y = next(batches)
        total = [torch.zeros_like(p) for p in trained]
        for i in range(len(x)):
            loss = workload.losses(x[i : i + 1], y[i : i + 1]).sum()
            gradient = torch.autograd.grad(loss, trained)
            norm = torch.stack([g.norm() for g in gradient]).norm()
            factor = (MAX_NORM / norm).clamp(max=1)
            torch._foreach_add_(total, torch._foreach_mul(gradient, factor))
        _write_noised(trained, total, key, workload.batch)
        optimizer.step()

    yield step


@contextmanager
def _private_run(workload: Workload, how: str) -> Iterator[Private]:
    """`make_private` with a ledger on disk."""
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
            augmentation_multiplicity=workload.views,
            ledger=Path(folder) / "ledger",
        ) as private,
    ):
        yield private


@contextmanager
def _private(workload: Workload, how: str) -> Iterator[Step]:
    """A private step with one of the methods of `PerExample`."""
    with _private_run(workload, how) as private:
        batches = chain.from_iterable(repeat(private.loader))

        def step() -> None:
            x, y = next(batches)
            private.step(workload.losses(x, y))

        yield step


@contextmanager
def _compiled(workload: Workload, backend: str) -> Iterator[Step]:
    """A private step as one graph."""
    with _private_run(workload, AUTO) as private:
        yield compiled_steps(workload, private, settling_steps(COMPILED), backend)


def _noise_like(trained: Sequence[nn.Parameter], key: NoiseKey, batch: int) -> list[Tensor]:
    """Noise for the mean over a batch: one draw for all parameters, split into views with their memory layout."""
    sizes = [p.numel() for p in trained]
    std = NOISE_MULTIPLIER * MAX_NORM / batch
    noise = gaussian(key.derive("noise"), sum(sizes), std, device=trained[0].device)
    key.advance()
    parts = torch.split(noise, sizes)
    return [part.as_strided(p.shape, p.stride()) for p, part in zip(trained, parts, strict=True)]


def _write_noised(trained: Sequence[nn.Parameter], total: Sequence[Tensor], key: NoiseKey, batch: int) -> None:
    """Write (sum + noise) / batch to `.grad`."""
    for p, own, noise in zip(trained, total, _noise_like(trained, key, batch), strict=True):
        p.grad = noise + own / batch


_METHODS: dict[str, Method] = {
    REFERENCE: _non_private,
    PLAIN_AND_NOISE: _plain_and_noise,
    GRAPHED: graphed_steps,
    PLAIN_COMPILED: _plain_compiled,
    COMPILED: partial(_compiled, backend="cudagraphs"),
    INDUCTOR: partial(_compiled, backend="inductor"),
    **{how: partial(_private, how=how) for how in (AUTO, "bookkeeping", REWEIGHT, "instantiate", "vmap", "loop")},
    ONE_BY_ONE: _one_by_one,
    **{
        name: partial(opacus_steps, mode=name.split()[1], max_norm=MAX_NORM, noise_multiplier=NOISE_MULTIPLIER)
        for name in OPACUS
    },
}
# The methods of the paper's figures; the others belong to the comparison with peers.
_IN_FIGURES = [name for name in _METHODS if name not in (GRAPHED, PLAIN_COMPILED, COMPILED, INDUCTOR, AUTO)]
# The first steps check graphs, rules and losses. They are slower than later steps, so they are not counted.
_SETTLING = {AUTO: 6, COMPILED: 12, INDUCTOR: 12, "bookkeeping": 6, REWEIGHT: 6, "instantiate": 6}
PAPER_NAMES = {REWEIGHT: "ReweightGP", "vmap": "multiLoss", ONE_BY_ONE: "nxBP"}


def all_methods() -> list[str]:
    """Every method of the paper's figures, in the order of tables."""
    return list(_IN_FIGURES)


def available_methods(wanted: list[str] | None = None, known: Sequence[str] = _IN_FIGURES) -> list[str]:
    """The selected methods, or all known ones; Opacus only where it is installed."""
    for name in wanted or []:
        if name not in known:
            choices = ", ".join(map(repr, known))
            raise ConfigurationError(f"method={name!r} is not known: use one of {choices}.")
    return [name for name in known if (not wanted or name in wanted) and _is_installed(name)]


def unavailable(method: str, device: torch.device) -> str | None:
    """Why a method cannot run here, or None."""
    if is_graphed(method) and device.type != "cuda":
        return "needs CUDA graphs"
    if method in (INDUCTOR, PLAIN_COMPILED) and not is_available(device.type):
        return "needs Triton on CUDA, or a C++ compiler"
    return None if _is_installed(method) else "Opacus is not installed"


def is_graphed(method: str) -> bool:
    """Whether a method needs CUDA graphs."""
    return method in (GRAPHED, COMPILED)


def _is_installed(method: str) -> bool:
    return method not in OPACUS or importlib.util.find_spec("opacus") is not None


def steps_by(method: str, workload: Workload) -> AbstractContextManager[Step]:
    """A context manager that yields the function to call for each step."""
    return _METHODS[method](workload)


def settling_steps(method: str) -> int:
    """How many steps of a method are not counted."""
    return _SETTLING.get(method, 2)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
