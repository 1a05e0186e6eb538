"""`clipwise audit` and `clipwise check --neighbours`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calls import clipwise, refused, write_ledger

SUBJECT = """
import torch, clipwise
from torch import nn
from torch.utils.data import TensorDataset

STEPS = {steps}
torch.manual_seed(0)
DATA = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))

def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")

def train(dataset, ledger=None):
    model = nn.Linear(4, 2)
    private = clipwise.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataset, sampling="full", steps=STEPS,
        noise_multiplier=1.0, ledger=ledger,
    )
    for _ in range(STEPS):
        for x, y in private.loader:
            private.step(losses(model, x, y))
    private.close()

def subject():
    return train, DATA

def with_loss():
    return train, DATA, losses

def example():
    return nn.Linear(4, 2), losses, DATA.tensors

def nonsense():
    return 3
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the ledger of a run, and the script that made it."""
    (tmp_path / "subject.py").write_text(SUBJECT.format(steps=1))
    names: dict[str, object] = {}
    exec(SUBJECT.format(steps=1), names)
    names["train"](names["DATA"], ledger=tmp_path / "ledger")  # type: ignore[operator]
    return tmp_path


@pytest.mark.slow
def test_a_run_is_within_its_claim(run: Path) -> None:
    result = clipwise("audit", run, "--runs", 100, "--canaries", 8, "--plot", run / "audit.png")
    assert result.exit_code == 0, result.output
    assert "As declared" in result.stdout and "Within the claim" in result.stdout
    assert "dirac canary" in result.stdout and "one run of many canaries" in result.stdout
    assert (run / "audit.png").stat().st_size > 1000


def test_json(run: Path) -> None:
    result = clipwise("audit", run / "ledger", "--subject", f"{run}/subject.py:subject", "--runs", 100, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    (attack,) = content["attacks"]
    assert content["ok"] and content["neighbours"]["ok"]
    assert 0 < attack["measured"]["mu"] < attack["claimed"]["mu"] == pytest.approx(1.0, rel=1e-3)


def test_more_than_claimed_ends_with_1(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.audit.bugs.noise_over_batch_size import plant

    plant(monkeypatch)
    result = clipwise("audit", run, "--runs", 100)
    assert result.exit_code == 1, result.output
    assert "MORE THAN CLAIMED" in result.stdout and "Not as declared" in result.stdout


def test_a_mislabelled_canary_takes_the_loss_of_the_subject(run: Path) -> None:
    subject = ["--subject", f"{run}/subject.py:with_loss", "--kind"]
    result = clipwise("audit", run, *subject, "mislabelled", "--runs", 40)
    assert result.exit_code == 0, result.output
    assert "mislabelled canary: 40 runs with it and 40 without, " in result.stdout
    assert " of 40 guesses right" in result.stdout  # the first 20 of each world do not count
    refused(clipwise("audit", run, "--kind", "mislabelled"), "(make_run, dataset, loss)")
    refused(clipwise("audit", run, *subject, "loud"), "--kind loud")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--confidence", 2], ["--confidence must be", "at least 0.5", "not 2.0"]),
        (["--runs", 1], ["--runs=1", "at least 2"]),
        (["--runs", 30, "--kind", "mislabelled"], ["--runs=30", "--kind mislabelled", "at least 40"]),
        (["--canaries", 1], ["--canaries must be", "from 2", "not 1"]),
        (["--canaries", 17], ["--canaries must be", "to 16", "not 17"]),
        (["--delta", 2], ["--delta must be", "not 2.0"]),
        (["--runs", 0, "--plot", "a.png"], ["--plot", "--runs 0", "--canaries"]),
    ],
)
def test_invalid_options_are_refused_before_any_run(
    run: Path, options: list[object], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    result = clipwise("audit", run, "--subject", f"{run}/subject.py:with_loss", *options)
    refused(result, *words)  # with one line on stderr: "Training ..." would be another
    assert not result.stdout and not (run / "a.png").exists()


def test_canaries_alone_can_be_plotted(run: Path) -> None:
    pytest.importorskip("matplotlib")
    result = clipwise("audit", run, "--runs", 0, "--canaries", 8, "--plot", run / "audit.png")
    assert result.exit_code == 0, result.output
    assert (run / "audit.png").stat().st_size > 1000


def test_a_run_that_differs_from_the_ledger_is_refused(run: Path) -> None:
    (run / "subject.py").write_text(SUBJECT.format(steps=2))
    refused(clipwise("audit", run, "--runs", 2), "a different run")
    refused(clipwise("audit", write_ledger(run / "other", 1), "--runs", 2), "a different run")


def test_what_is_missing_is_named(run: Path, tmp_path: Path) -> None:
    refused(clipwise("audit", run, "--subject", f"{run}/subject.py:nonsense"), "must return (make_run, dataset)")
    (run / "subject.py").unlink()
    refused(clipwise("audit", run), "There is no file")
    refused(clipwise("audit", run), "--subject")
    refused(clipwise("audit", tmp_path / "nowhere"), "cannot be read as a ledger")


def test_check_compares_neighbours(run: Path) -> None:
    result = clipwise("check", "--neighbours", f"{run}/subject.py:example")
    assert result.exit_code == 0, result.output
    assert "Accepted" in result.stdout and "As declared" in result.stdout
    assert "As declared" not in clipwise("check", f"{run}/subject.py:example").stdout


def test_check_finds_what_only_neighbours_show(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.audit.bugs.mean_for_sum import plant

    plant(monkeypatch)
    assert clipwise("check", f"{run}/subject.py:example").exit_code == 0
    result = clipwise("check", "--neighbours", f"{run}/subject.py:example")
    assert result.exit_code == 1, result.output
    assert "sensitivity" in result.stdout
