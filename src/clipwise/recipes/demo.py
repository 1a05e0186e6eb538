"""The demo: one small network on real digits, trained without privacy and at two privacy budgets.

All three runs share one loop, so that their accuracy and time are comparable.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from clipwise.clipping import PerExample
from clipwise.engine import checkpoint
from clipwise.engine.make_private import make_private
from clipwise.errors import ConfigurationError
from clipwise.recipes.digits import digits
from clipwise.recipes.small_cnn import small_cnn
from clipwise.report.statement import Statement

DELTA = 1e-5
NOTE = (
    "The network, learning rate, clipping norm, batch size and number of epochs were tuned on these digits, which are "
    "public. On private data tuning costs privacy too: tune on public data, or account for it."
)


@dataclass(frozen=True)
class Recipe:
    """The settings of a run. `epsilon` and `max_norm` are None without privacy."""

    name: str
    epsilon: float | None
    max_norm: float | None
    batch_size: int
    epochs: int
    learning_rate: float
    momentum: float = 0.9


RECIPES = (
    Recipe("without privacy", None, None, batch_size=512, epochs=60, learning_rate=0.2),
    Recipe("epsilon 8", 8.0, 0.5, batch_size=512, epochs=60, learning_rate=0.4),
    Recipe("epsilon 3", 3.0, 0.5, batch_size=512, epochs=40, learning_rate=0.3),
)


@dataclass(frozen=True)
class Moment:
    """Progress of a run that may be shown: all of it is public or noised."""

    step: int
    steps: int
    accuracy: float | None
    rdp_epsilon: float | None


Watch = Callable[[Moment], None]


@dataclass(frozen=True)
class Result:
    """The result of a run. `epsilon` is that of the PLD accountant."""

    name: str
    accuracy: float
    steps: int
    seconds_per_step: float
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    statement: Statement | None = None


def shortened(recipe: Recipe, epochs: int | None) -> Recipe:
    """The recipe with another number of epochs, if one is given."""
    return recipe if epochs is None else replace(recipe, epochs=epochs)


def fresh_folder(wanted: Path) -> Path:
    """`wanted`, or the first of `wanted-2`, `wanted-3`, ... that does not exist: no ledger is overwritten."""
    number = 1
    folder = wanted
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if folder.is_dir() and not any(folder.iterdir()):
                return folder
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise ConfigurationError(f"--out: {folder} cannot be written ({error.strerror}).") from error


def run(recipe: Recipe, folder: Path, *, seed: int | None, watch: Watch) -> Result:
    """Train a recipe; write metrics and weights and, if private, ledger, checkpoint and statement to `folder`.

    A seed makes the run reproducible; its statement then claims no guarantee. `watch` is called after every step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with one_thread(), torch.random.fork_rng(devices=[]):
        if seed is None:
            torch.seed()  # otherwise every process would start with the same weights
        else:
            torch.manual_seed(seed)
        model = small_cnn()
        optimizer = torch.optim.SGD(model.parameters(), recipe.learning_rate, recipe.momentum)
        if recipe.epsilon is None:
            result = _train_plainly(recipe, model, optimizer, watch)
        else:
            result = _train_privately(recipe, model, optimizer, folder, seed, watch)
    save_file(model.state_dict(), folder / "model.safetensors")
    _write_metrics(folder / "metrics.json", recipe, result)
    return result


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: the network is so small that several threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train_plainly(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, watch: Watch) -> Result:
    data = digits(train=True)
    # Whole batches by index, as the private loader fetches them, for a fair comparison.
    batches = BatchSampler(RandomSampler(data), recipe.batch_size, drop_last=False)
    loader = DataLoader(data, batch_size=None, sampler=batches)

    def step(losses: Tensor | None) -> None:
        assert losses is not None  # these batches are never empty
        optimizer.zero_grad()
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    seconds = _train(model, loader, step, recipe.epochs, len(batches), watch, lambda: None)
    return Result(recipe.name, accuracy(model), len(seconds), statistics.median(seconds))


def _train_privately(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, seed: int | None, watch: Watch
) -> Result:
    assert recipe.epsilon is not None and recipe.max_norm is not None
    with make_private(
        model,
        optimizer,
        digits(train=True),
        clipping=PerExample(max_norm=recipe.max_norm),
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        epsilon=recipe.epsilon,
        delta=DELTA,
        ledger=folder / "ledger",
        seed=seed,
        loss=lambda images, labels: F.cross_entropy(model(images), labels, reduction="none"),
    ) as private:
        seconds = _train(
            model,
            private.loader,
            private.step,
            recipe.epochs,
            len(private.loader),
            watch,
            lambda: private.spent(accountant="rdp").epsilon,
        )
        checkpoint.save(folder / "checkpoint.pt", {"private": private.state_dict(), "model": model.state_dict()})
        statement = private.statement()
    # The run is complete and its budget is spent. It will not be resumed, so its secrets can be deleted.
    (folder / "ledger.resume").unlink()
    _write_statement(folder, statement)
    return Result(
        recipe.name,
        accuracy(model),
        statement.spent.steps,
        statistics.median(seconds),
        epsilon=statement.spent.epsilon,
        delta=statement.spent.delta,
        noise_multiplier=private.noise_multiplier,
        statement=statement,
    )


def _train(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    step: Callable[[Tensor | None], object],
    epochs: int,
    steps_per_epoch: int,
    watch: Watch,
    rdp_epsilon: Callable[[], float | None],
) -> list[float]:
    """Train, and return the duration of each step, from fetching its batch to the update."""
    seconds: list[float] = []
    reached: float | None = None
    for _ in range(epochs):
        begin = time.perf_counter()
        for images, labels in loader:
            # One loss per example. A sampled batch may be empty and then needs no forward pass.
            step(F.cross_entropy(model(images), labels, reduction="none") if len(images) else None)
            seconds.append(time.perf_counter() - begin)
            if len(seconds) % steps_per_epoch == 0:
                reached = accuracy(model)
            watch(Moment(len(seconds), epochs * steps_per_epoch, reached, rdp_epsilon()))
            begin = time.perf_counter()
    return seconds


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Accuracy on the test part, which is never trained on."""
    images, labels = digits(train=False).tensors
    return float((model(images).argmax(1) == labels).float().mean())


def _write_statement(folder: Path, statement: Statement) -> None:
    (folder / "statement.txt").write_text(f"{statement}\n  note         {NOTE}\n")
    content = {**statement.to_dict(), "notes": [NOTE]}
    (folder / "statement.json").write_text(json.dumps(content, indent=2) + "\n")


def _write_metrics(path: Path, recipe: Recipe, result: Result) -> None:
    content = {
        "recipe": asdict(recipe),
        "test_accuracy": result.accuracy,
        "steps": result.steps,
        "median_seconds_per_step": result.seconds_per_step,
        "epsilon": result.epsilon,
        "delta": result.delta,
        "accountant": None if result.epsilon is None else "pld",
        "noise_multiplier": result.noise_multiplier,
        "seeded": None if result.statement is None else result.statement.seeded,
        "notes": [NOTE],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
