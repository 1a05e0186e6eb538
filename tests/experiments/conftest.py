"""What the tests of `python -m experiments` share."""

import pytest
import torch

from experiments.batch_clipping import training, tuned
from experiments.batch_clipping.pictures import pictures

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def on_one_core():
    """Small tensors: several threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def digits():
    return pictures("digits", None, CPU, judged_by="test")


@pytest.fixture
def fake(monkeypatch):
    """Training that takes no time: of trials the second is best."""
    made = []
    second = tuned.trials("IC, flat, group norm", 8.0)[1].noise_rate

    def train(setting, pictures, seed, deadline, kept):
        made.append((setting, len(pictures.held_out)))
        if setting.parts == "zhang":
            raise ValueError("no such thing\nand more")
        best = setting.noise_rate == second
        return {"accuracy": 0.5 + 0.2 * best + 0.1 * seed, "epsilon": 2.0, "seconds": 0.1, "adjacency": "zero-out"}

    monkeypatch.setattr(training, "train", train)
    return made


@pytest.fixture
def everywhere_digits(monkeypatch, digits):
    """Every data set is the small one."""
    monkeypatch.setattr(training, "_loaded", lambda *_: digits)
