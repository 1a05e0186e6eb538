"""Damaged ledgers and checkpoints, and checks of models."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise import ClipwiseError, Event, FileLedger, check
from clipwise.engine import checkpoint
from clipwise.ledger import ledger
from tests.api_fuzz.outcome import require
from tests.api_fuzz.values import Choice


def damaged_ledger(choice: Choice) -> list[str]:
    """A damaged file never reads as fewer releases than were made, unless whole lines are missing."""
    event = Event.from_dict(
        {
            "sampling": "poisson",
            "adjacency": "zero-out",
            "unit": "record",
            "sample_rate": 0.5,
            "noise_multiplier": 1.0,
            "period": 1,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ledger"
        with FileLedger(path, block=choice.dice.choice((1, 4))) as opened:
            for _ in range(choice.dice.randint(0, 6)):
                opened.charge(event)
            made = opened.position
        data = bytearray(path.read_bytes())
        last = data[:-1].rfind(b"\n") + 1  # start of the last line
        place = choice.dice.randrange(len(data))
        how = choice.dice.choice(("cut", "flip", "insert", "zeros", "foreign", "none"))
        if how == "cut":
            del data[place:]
        elif how == "flip":
            data[place] ^= 1 << choice.dice.randrange(8)
        elif how == "insert":
            data[place:place] = choice.dice.randbytes(choice.dice.randint(1, 9))
        elif how == "zeros":
            data[place:] = bytes(len(data) - place)
        elif how == "foreign":
            data[:] = choice.dice.randbytes(place)
        path.write_bytes(data)
        refusals = []
        try:
            found = ledger.read(path).position
            # Missing whole lines at the end cannot be detected; a torn last line can.
            gone = how in ("cut", "zeros") and place <= last
            require(found >= made or gone, f"{made} releases read as {found} after {how}")
            with FileLedger(path) as opened:
                require(opened.position >= found, "opening it has lost releases")
                opened.charge(event)
                require(opened.position == found + 1, "a charge was not counted once")
        except ClipwiseError as refusal:
            refusals.append(type(refusal).__name__)
            require(str(path) in str(refusal), f"the message does not name the file: {refusal}")
        return refusals


def damaged_checkpoint(choice: Choice) -> list[str]:
    """A damaged checkpoint is refused, and the error names the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        checkpoint.save(path, {"model": {"w": torch.ones(2)}, "position": 3})
        data = bytearray(path.read_bytes())
        if choice.is_likely(0.5):
            del data[choice.dice.randrange(len(data)) :]
        else:
            data = bytearray(choice.dice.randbytes(choice.dice.randrange(200)))
        path.write_bytes(data)
        try:
            checkpoint.load(path)
        except ClipwiseError as refusal:
            require(str(path) in str(refusal), "the message does not name the file")
            return [type(refusal).__name__]
        raise AssertionError("a damaged checkpoint was read")


def checked(choice: Choice) -> list[str]:
    """`check` returns a report for every model, loss and batch."""
    model = choice.of("model", nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])

    def plain(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x), y, reduction="none")

    loss = choice.of("loss", plain, lambda m, x, y: plain(m, x, y).mean(), lambda m, x, y: plain(m, x, y) / len(x))
    batch = choice.of("batch", (x, y), [x, y], (x[:1], y[:1]))
    report = check(model, loss, batch)
    right = loss is plain and not choice.spoiled and len(batch[1]) == len(batch[0]) == 4
    require(report.ok == right or bool(choice.spoiled), f"check says {report.ok}")
    return [] if report.ok else ["problem"]
