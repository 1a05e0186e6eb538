"""The same noise on two sums reveals their difference: no fork of a run may reuse noise.

A run forks with its process, by copied files, and by resuming one checkpoint twice.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise import Private
from clipwise.engine import checkpoint, step
from clipwise.errors import CheckpointError, LedgerError, PrivacyWarning, StepError
from tests.engine.test_private import ALL
from tests.runs import clipped_sum_by_hand, data, gradients, losses_of, network, private_run, train

DOUBLE = torch.float64
KINDS = [
    "standard",
    pytest.param(
        "secure",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed"
        ),
    ),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def in_a_fork(act: Callable[[], None]) -> bool:
    """Whether `act` succeeded in a child process."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("noise", KINDS)
def test_a_forked_process_cannot_step_and_leaves_nothing_behind(noise: str, tmp_path: Path) -> None:
    model, private = private_run(noise=noise, ledger=tmp_path / "run.ledger")
    train(model, private, 3)
    batch = next(iter(private.loader))
    losses = losses_of(model, batch)
    before = (tmp_path / "run.ledger").read_bytes()

    def child() -> None:
        for act in (lambda: private.step(losses), lambda: next(iter(private.loader)), lambda: private.state_dict()):
            try:
                act()
            except StepError as error:
                assert "forked" in str(error)
            else:
                assert act() is not None and "key" not in private.state_dict()
        try:
            step.charge(private._context)
            raise AssertionError("a fork charged the ledger")
        except LedgerError:
            pass
        private.close()

    assert in_a_fork(child)
    assert (tmp_path / "run.ledger").read_bytes() == before
    assert not (tmp_path / "run.ledger.resume").exists()
    private.step(losses)  # the parent continues
    private.close()
    assert (tmp_path / "run.ledger.resume").exists()


class Files:
    """The files of a run that was stopped after a few steps."""

    def __init__(self, folder: Path, noise: str) -> None:
        self.folder, self.noise = folder, noise
        folder.mkdir()
        model, private = self._run()
        train(model, private, 3)
        checkpoint.save(folder / "run.pt", {"model": model.state_dict(), "private": private.state_dict()})
        private.close()

    def copied(self, name: str) -> Files:
        other = Files.__new__(Files)
        other.folder, other.noise = self.folder.with_name(name), self.noise
        shutil.copytree(self.folder, other.folder)
        return other

    def _run(self, **options: Any) -> tuple[nn.Module, Private]:
        model = network(DOUBLE)
        dataset = options.pop("dataset", None) or data(dtype=DOUBLE)
        return private_run(model, None, dataset, noise=self.noise, ledger=self.folder / "run.ledger", **options)

    def next_release(
        self, change: Callable[[nn.Module], None] = lambda model: None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Resume for one step, as in a new process. Returns the sum and its noise."""
        model, private = self._run(**options)
        state = checkpoint.load(self.folder / "run.pt")
        model.load_state_dict(state["model"])
        change(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            private.load_state_dict(state["private"])
        batch = next(iter(private.loader))
        indices = private.loader.current.indices.tolist()  # type: ignore[union-attr]
        total = clipped_sum_by_hand(model, private._context.plan.dataset, indices, {ALL: 1.0})
        private.backward(losses_of(model, batch))
        found = gradients(model)
        private._context.ledger.close()
        whole = torch.cat([total[name].flatten() for name in found])
        return whole, torch.cat([found[n].flatten() * private.divisor for n in found]) - whole


def are_unrelated(first: Tensor, second: Tensor) -> bool:
    """39 independent normals have a correlation of 0.75 once in ten million times; equal ones have 1."""
    return abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.75


def moved_weights(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6


def changed_record() -> Any:
    changed = data(dtype=DOUBLE)
    changed.tensors[0][0] += 1
    return changed


FORKS: dict[str, dict[str, Any]] = {
    "another multiplier": {"noise_multiplier": 1.5},
    "another record": {"dataset": changed_record()},
    "another scheme": {"sampling": "fixed-size"},
}


@pytest.mark.parametrize("noise", KINDS)
@pytest.mark.parametrize("fork", FORKS)
def test_copied_files_give_another_run_other_noise(noise: str, fork: str, tmp_path: Path) -> None:
    """Even the unused resume file is copied."""
    files = Files(tmp_path / "run", noise)
    copied = files.copied("copy")
    _, first = files.next_release()
    _, second = copied.next_release(**FORKS[fork])
    assert are_unrelated(first, second)


def test_copied_files_with_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not hold the weights"):
        Files(tmp_path / "run", "standard").next_release(change=moved_weights)


@pytest.mark.parametrize("noise", KINDS)
def test_copied_files_with_equal_steps_release_the_same_twice(noise: str, tmp_path: Path) -> None:
    """The same sum and noise: the second release adds no information."""
    files = Files(tmp_path / "run", noise)
    copied = files.copied("copy")
    for first, second in zip(files.next_release(), copied.next_release(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("noise", KINDS)
def test_a_checkpoint_that_is_resumed_twice_has_other_noise_the_second_time(noise: str, tmp_path: Path) -> None:
    files = Files(tmp_path / "run", noise)
    noises = [files.next_release()[1] for _ in range(3)]
    for i, first in enumerate(noises):
        for second in noises[:i]:
            assert are_unrelated(first, second)
