"""Mistakes around a run, each planted in a program of a few lines, and the tool that catches it.

`python -m tests.audit.habits` writes their table into docs/concepts/audit.md.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import clipwise
from clipwise.errors import (
    ClipwiseError,
    ConfigurationError,
    CoupledExamplesError,
    LedgerError,
    PrivacyWarning,
    StepError,
    UnsupportedModelError,
)
from clipwise.ledger import multi_run
from clipwise.report.statement import of_ledger

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "audit.md"
PLACE = re.compile(r"(<!-- habits -->\n).*?(<!-- end of habits -->)", re.DOTALL)
HEAD = "| item | mistake | caught by | where it is tested |\n|---|---|---|---|\n"

N, D, CLASSES = 24, 5, 3


@dataclass(frozen=True)
class Habit:
    """Args: item of the list; name; tool that catches it; tested names a file; plant returns whether it was caught."""

    item: int
    name: str
    tool: str
    tested: str
    plant: Callable[[Path], bool]


def network(*first: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def run(model: nn.Module, **options: Any) -> clipwise.Private:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(N, D), torch.arange(N) % CLASSES)
    defaults: dict[str, Any] = {"sampling": "full", "noise_multiplier": 1.0}
    if options.keys() & {"epsilon"}:
        del defaults["noise_multiplier"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return clipwise.make_private(model, optimizer, data, **{**defaults, **options})


def train(private: clipwise.Private, loss: Callable[..., Tensor], steps: int = 3) -> None:
    while private.steps < steps:
        for batch in private.loader:
            private.step(loss(*batch))


def raises(kind: type[ClipwiseError], words: str, act: Callable[[], object]) -> bool:
    """Whether the call is refused with these words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        try:
            act()
        except kind as error:
            return re.search(words, str(error)) is not None
    return False


def partition(folder: Path) -> bool:
    return raises(ConfigurationError, "partition", lambda: run(network(), sampling="partition", batch_size=6))


def one_budget_for_two(folder: Path) -> bool:
    def act() -> None:
        for join in (False, True):
            model = network()
            ledger = clipwise.FileLedger(folder / "ledger", join=join)
            with run(model, ledger=ledger, epsilon=2.0, delta=1e-5, steps=3) as private:
                train(private, lambda x, y, m=model: losses_of(m, x, y), 3)  # type: ignore[misc]

    return raises(ClipwiseError, "epsilon", act)


def merged_epochs(folder: Path) -> bool:
    ledger = clipwise.MemoryLedger()
    options = {"sampling": "shuffled", "batch_size": 6, "ledger": ledger}
    for _ in range(2):
        model = network()
        private = run(model, **options)
        x, y = next(iter(private.loader))
        private.step(losses_of(model, x, y))
    return [entry.count for entry in ledger.history()] == [1, 1]


def removed_ledger(folder: Path) -> bool:
    model = network()
    private = run(model, ledger=folder / "ledger")
    train(private, lambda x, y: losses_of(model, x, y), 1)
    (folder / "ledger").unlink()
    return raises(LedgerError, "removed", lambda: train(private, lambda x, y: losses_of(model, x, y), 2))


def plain_loop(folder: Path) -> bool:
    model = network()
    private = run(model)
    for _ in range(2):
        losses_of(model, torch.randn(8, D), torch.arange(8) % CLASSES).mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            private.optimizer.step()
    return raises(StepError, "make_private, left", private.statement)


def scaled_losses(folder: Path) -> bool:
    model = network()
    private = run(model)
    scale = torch.tensor(65536.0)
    return raises(StepError, "GradScaler", lambda: train(private, lambda x, y: scale * losses_of(model, x, y)))


def one_seed_twice(folder: Path) -> bool:
    paths = [folder / "first", folder / "second"]
    for path in paths:
        model = network(nn.Dropout(0.5))
        with run(model, seed=1, ledger=path) as private:
            train(private, lambda x, y, m=model: losses_of(m, x, y), 2)  # type: ignore[misc]
            claims = private.statement().to_dict()["guarantee"]
    return claims is None and raises(LedgerError, "same noise key", lambda: multi_run.read_files(paths))


def known_masks(folder: Path) -> bool:
    model = network(nn.Dropout(0.5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(run(model), lambda x, y: losses_of(model, x, y), 1)
    return any("seeded by hand" in str(w.message) for w in caught)


def hidden_coupling(folder: Path) -> bool:
    model = network()
    head = model[-1]
    assert isinstance(head, nn.Linear)
    nn.init.zeros_(head.weight)
    private = run(model)
    return raises(
        CoupledExamplesError,
        "inputs of another",
        lambda: train(private, lambda x, y: losses_of(model, x - x.mean(0), y)),
    )


def shared_factor(folder: Path) -> bool:
    model = network()
    private = run(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model, x, y) / (y != 0).sum()

    return raises(CoupledExamplesError, "whole batch", lambda: train(private, loss))


def pairs(folder: Path) -> bool:
    model = nn.Linear(D, 1)
    private = run(model)
    return raises(
        CoupledExamplesError, "pair", lambda: train(private, lambda x, y: ((model(x) - y) ** 2).flatten(1).sum(1))
    )


def mixup(folder: Path) -> bool:
    def collate(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return 0.7 * x + 0.3 * x.roll(1, 0), y

    model = network()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model, x, y)

    return raises(CoupledExamplesError, "collated", lambda: train(run(model, collate_fn=collate, loss=loss), loss))


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.mean[0] += float(x.detach().mean())
        return x


def learned_list(folder: Path) -> bool:
    model = network(Remembering())
    private = run(model)
    return raises(UnsupportedModelError, "mean", lambda: train(private, lambda x, y: losses_of(model, x, y)))


class UntilAllConverge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while bool((x.detach().abs() > 1).any()):
            x = 0.9 * x
        return x


def control_flow(folder: Path) -> bool:
    model = network(UntilAllConverge())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model, x, y)

    return raises(CoupledExamplesError, "other examples", lambda: train(run(model, loss=loss), loss))


def crashed_count(folder: Path) -> bool:
    model = network()
    private = run(model, ledger=folder / "ledger")
    train(private, lambda x, y: losses_of(model, x, y), 3)
    return not of_ledger(folder / "ledger").exact  # the state on disk during the run, or after a crash


SOUNDNESS = "tests/soundness"
HABITS = (
    Habit(
        1, "`sampling='partition'` with per-example clipping", "`make_private`", f"{SOUNDNESS}/test_exact.py", partition
    ),
    Habit(
        2,
        "two runs, one ledger, one budget",
        "the ledger's budget",
        "tests/ledger/test_multi_run.py",
        one_budget_for_two,
    ),
    Habit(2, "shuffled epochs of two runs", "run tags in the ledger", "tests/ledger/test_multi_run.py", merged_epochs),
    Habit(3, "a crash, and a count that is called exact", "the ledger", "tests/ledger/test_ledger.py", crashed_count),
    Habit(3, "a ledger file that is removed", "every charge", "tests/ledger/test_ledger.py", removed_ledger),
    Habit(4, "a plain training loop", "verified weights", "tests/validation/test_inventory_state.py", plain_loop),
    Habit(6, "`GradScaler`", "`private.step`", "tests/validation/test_training_loop.py", scaled_losses),
    Habit(7, "one seed, two executions", "the statement; key ids", f"{SOUNDNESS}/test_seeded.py", one_seed_twice),
    Habit(
        8,
        "dropout under `torch.manual_seed`",
        "a warning at the first step",
        "tests/sampling/test_generators.py",
        known_masks,
    ),
    Habit(
        9, "a coupling behind a head of zeros", "independence probe", "tests/validation/test_marked.py", hidden_coupling
    ),
    Habit(
        10, "a divisor of the whole batch", "shared factors", "tests/validation/test_shared_factors.py", shared_factor
    ),
    Habit(11, "outputs (B, 1) against targets (B,)", "independence probe", "tests/validation/test_coupling.py", pairs),
    Habit(12, "mixup in `collate_fn`", "replacement test", "tests/validation/test_first_batches.py", mixup),
    Habit(13, "a running mean in a list", "plain attributes", "tests/validation/test_forward_changes.py", learned_list),
    Habit(
        17,
        "a loop until the whole batch has converged",
        "replacement test",
        "tests/validation/test_replacement.py",
        control_flow,
    ),
)
# Former mistakes of the library that are fixed, or mistakes that cannot be shown in one process.
OTHERS = (
    (5, "`torchrun` without a process group", "`make_private`", "tests/validation/test_training_loop.py"),
    (8, "random views from 32 bits", "drawn from the run's key", "tests/sampling/test_augmentation.py"),
    (
        14,
        "a batch size in an error message",
        "every refusal is provoked",
        f"{SOUNDNESS}/test_messages_without_sizes.py",
    ),
    (15, "gradients of an `autograd.Function`", "a forward pass per example", "tests/gradients/test_functions.py"),
    (16, "complex arithmetic", "a forward pass per example", "tests/gradients/test_complex.py"),
)


def rows() -> str:
    """The lines of the table."""
    listed = [(h.item, h.name, h.tool, h.tested) for h in HABITS] + list(OTHERS)
    return "".join(f"| {item} | {name} | {tool} | `{tested}` |\n" for item, name, tool, tested in sorted(listed))


def main() -> None:
    """Write the table."""
    PAGE.write_text(PLACE.sub(lambda place: place[1] + HEAD + rows() + place[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
