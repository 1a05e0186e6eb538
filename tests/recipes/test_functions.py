from __future__ import annotations

import pytest

from clipwise.errors import ClipwiseError, ConfigurationError
from clipwise.ledger.ledger import read
from clipwise.recipes.config import Choices
from clipwise.recipes.interrupts import Interrupts
from clipwise.recipes.planning import plan_of
from clipwise.recipes.run_folder import RunFolder
from clipwise.recipes.train import begin, reopened, train

MODULE = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

def problem():
    data = TensorDataset(torch.randn(50, 3), torch.randint(2, (50,)))
    return nn.Linear(3, 2), data, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")

def wrong():
    return problem()[:2]

def frozen():
    model, data, loss = problem()
    return model.requires_grad_(False), data, loss

class Named(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}

def mixing():
    data = problem()[1]
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), data, problem()[2]

def named():
    model, data, loss = problem()
    return model, Named(*data.tensors), loss

def fails():
    raise KeyError("no such file")
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path / "mine.py"


def test_a_function_gives_model_data_and_loss(module, tmp_path):
    choices = Choices(path=f"{module}:problem", epsilon=2.0, epochs=2, batch_size=10, device="cpu")
    plan = plan_of(choices)
    assert len(plan.training_rows) == 50 and not len(plan.held_out_rows)  # there is no accuracy to release
    (tmp_path / "run").mkdir()
    begin(plan, RunFolder(tmp_path / "run"), "")
    run = reopened(RunFolder(tmp_path / "run"))
    assert train(run, lambda moment: None, Interrupts())
    assert read(run.folder.ledger).position == 10 and set(run.folder.load_model()) == {"weight", "bias"}
    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        run.encoder.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [("wrong", "must return"), ("frozen", "requires_grad"), ("fails", "KeyError"), ("none", "'none'")],
)
def test_other_functions_are_refused(module, name, words):
    with pytest.raises(ConfigurationError, match=words):
        plan_of(Choices(path=f"{module}:{name}", epsilon=2.0))


@pytest.mark.parametrize("epsilon", [2.0, float("inf")])
def test_records_must_be_tuples_and_nothing_is_left_of_the_run(module, tmp_path, epsilon):
    plan = plan_of(Choices(path=f"{module}:named", epsilon=epsilon, epochs=1, batch_size=10, device="cpu"))
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigurationError, match="tuple of tensors"):
        begin(plan, RunFolder(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_private_leaves_no_folder(module, tmp_path):
    plan = plan_of(Choices(path=f"{module}:mixing", epsilon=2.0, epochs=1, batch_size=10, device="cpu"))
    (tmp_path / "run").mkdir()
    run = begin(plan, RunFolder(tmp_path / "run"), "")
    with pytest.raises(ClipwiseError, match="BatchNorm1d"):
        train(run, lambda moment: None, Interrupts())
    assert not (tmp_path / "run").exists()
