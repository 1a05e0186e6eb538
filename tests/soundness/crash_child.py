"""Kill private runs at chosen points, and record their visible releases and their ledgers.

    python crash_child.py FOLDER < plans.json > facts.json

One warm process forks a child for each plan. The child trains a tiny model and writes an unbuffered line for
every visible release. At the n-th visit of a point of `clipwise.ledger.crash_points` it is killed by
SIGKILL. With `power_cut`, the ledger first loses all data that was not synced, except for a torn piece.
A second child then continues from the last good checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from clipwise import FileLedger, PerExample, Private, make_private
from clipwise.engine import checkpoint, step
from clipwise.errors import PrivacyWarning
from clipwise.ledger import crash_points, ledger

STEPS, SAVE_EVERY, STEPS_AFTER = 12, 3, 4


class TearableSGD(torch.optim.SGD):
    """SGD that can be killed between two parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if number:
                    crash_points.reached("step.during-update")
                with torch.no_grad():
                    p.add_(p.grad, alpha=-group["lr"])


class Files:
    """The files of a run."""

    def __init__(self, folder: Path) -> None:
        self.ledger, self.checkpoint, self.log = folder / "run.ledger", folder / "run.pt", folder / "seen.log"

    def say(self, line: str) -> None:
        """Write a line that survives the process."""
        handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, f"{line}\n".encode())
        os.close(handle)

    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


class Death:
    """Ends the process at the n-th hit of a point."""

    def __init__(self, plan: dict[str, Any], files: Files) -> None:
        self._plan, self._files = plan, files
        self._hits: Counter[str] = Counter()
        self._durable = 0
        self._fsync = os.fsync
        os.fsync = self._sync  # type: ignore[assignment]
        crash_points.reached = self._reached

    def _sync(self, handle: int) -> None:
        self._fsync(handle)
        forgotten = self._plan.get("planted") == "no fsync" and self._hits
        if not forgotten and self._is_ledger(handle):
            self._durable = os.fstat(handle).st_size

    def _is_ledger(self, handle: int) -> bool:
        here = os.fstat(handle)
        return self._files.ledger.exists() and os.path.samestat(here, self._files.ledger.stat())

    def _reached(self, point: str) -> None:
        self._hits[point] += 1
        if point == "step.before-grad":
            self._files.say("release")  # from here on the release is visible
        if point == self._plan["point"] and self._hits[point] == self._plan["n"]:
            if self._plan.get("power_cut") is not None:
                lost = self._files.ledger.stat().st_size - self._durable
                os.truncate(self._files.ledger, self._durable + int(lost * self._plan["power_cut"]))
            os.kill(os.getpid(), signal.SIGKILL)


def charge_late(private: Private) -> None:
    """A planted fault: the ledger charges a release after it is visible."""
    charge, release = private._context.ledger.charge, step.release

    def released(*arguments: Any) -> None:
        waiting: list[Any] = []
        private._context.ledger.charge = lambda *charged: waiting.append(charged)  # type: ignore[method-assign,assignment]
        release(*arguments)
        private._context.ledger.charge = charge  # type: ignore[method-assign]
        charge(*waiting[0])

    step.release = released


def begin(plan: dict[str, Any], files: Files, join: bool = False) -> tuple[nn.Module, Private]:
    random = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(20, 3, generator=random), torch.randint(0, 2, (20,), generator=random))
    model = nn.Linear(3, 2)
    private = make_private(
        model,
        TearableSGD(model.parameters(), lr=0.1),
        dataset,
        clipping=PerExample(1.0),
        batch_size=5,
        sampling=plan["sampling"],
        noise_multiplier=1.0,
        ledger=FileLedger(files.ledger, join=join, block=plan["block"]),
        resume_file=files.ledger.with_suffix(".resume"),
    )
    return model, private


def train(model: nn.Module, private: Private, files: Files, steps: int) -> None:
    while steps:
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x), y, reduction="none"))
            files.say("update")
            steps -= 1
            if steps % SAVE_EVERY == 0:
                state = {"model": model.state_dict(), "private": private.state_dict()}
                files.say(f"saving {private._context.ledger.position}")
                checkpoint.save(files.checkpoint, state)
                files.say(f"saved {private._context.ledger.position}")
            if not steps:
                return


def first_life(plan: dict[str, Any], files: Files) -> None:
    Death(plan, files)
    model, private = begin(plan, files)
    if plan.get("planted") == "late charge":
        charge_late(private)
    backward = step.backward

    def seen(*arguments: Any) -> bool:
        done = backward(*arguments)
        if done:
            files.say("seen")
        return done

    step.backward = seen
    train(model, private, files, STEPS)
    private.close()


def second_life(plan: dict[str, Any], files: Files) -> None:
    """Continue from the last good checkpoint or, if there is none, as a new run in the same ledger."""
    saved = files.checkpoint.exists()
    model, private = begin(plan, files, join=not saved)
    files.say(f"opened {private._context.ledger.position}")
    if saved:
        state = checkpoint.load(files.checkpoint)
        model.load_state_dict(state["model"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            private.load_state_dict(state["private"])
    train(model, private, files, STEPS_AFTER)
    private.close()
    files.say("closed")


def in_a_child(life: Any, plan: dict[str, Any], files: Files) -> int:
    """Run a function in a child process. Returns its exit status."""
    child = os.fork()
    if child == 0:
        try:
            life(plan, files)
            os._exit(0)
        except BaseException as error:
            files.say(f"error {error!r}")
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def position(files: Files) -> int:
    """Return the ledger's number of releases, without changing it."""
    return ledger.read(files.ledger).position if files.ledger.stat().st_size else 0


def saved_position(files: Files) -> int | None:
    return checkpoint.load(files.checkpoint)["private"]["position"] if files.checkpoint.exists() else None


def facts_of(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    files = Files(folder)
    facts: dict[str, Any] = {**plan, "end": in_a_child(first_life, plan, files)}
    facts |= {"said": files.said(), "position": position(files), "checkpoint": saved_position(files)}
    if "planted" not in plan:
        facts |= {"second_end": in_a_child(second_life, plan, files), "final_position": position(files)}
        facts |= {"said_after": files.said()[len(facts["said"]) :], "clean": ledger.read(files.ledger).clean}
    return facts


def warm_up() -> None:
    """Import what an optimizer needs before forking. No backward pass: its threads would not be forked."""
    model = nn.Linear(1, 1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def main() -> None:
    torch.set_num_threads(1)
    warm_up()
    plans = json.load(sys.stdin)
    folder = Path(sys.argv[1])
    json.dump([facts_of(plan, folder / str(number)) for number, plan in enumerate(plans)], sys.stdout)


if __name__ == "__main__":
    main()
