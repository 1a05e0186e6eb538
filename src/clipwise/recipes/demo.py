"""The demo: `clipwise train` on real digits, without privacy and at two privacy budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from clipwise.recipes.config import Choices

DELTA = 1e-5
NOTE = (
    "The network, learning rate, clipping norm, batch size and number of epochs were tuned on these digits, which are "
    "public. On private data tuning costs privacy too: tune on public data, or account for it."
)
# Names and budgets of the runs.
RUNS = (("without-privacy", math.inf), ("epsilon-8", 8.0), ("epsilon-3", 3.0))


def choices(epsilon: float, *, epochs: int | None = None, seed: int | None = None) -> Choices:
    """One run on all 1437 training digits. The other 360 digits are public, and give an exact accuracy."""
    return Choices(
        path="digits",
        data_kind="digits",
        epsilon=epsilon,
        delta=DELTA,
        hold_out=0,
        public_test="digits",
        epochs=epochs,
        seed=seed,
        device="cpu",
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: the network is so small that several threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
