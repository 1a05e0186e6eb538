"""A given seed repeats noise and samples, so no output claims a guarantee for such a run."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from clipwise import FileLedger, Private
from clipwise.engine import checkpoint, describe
from clipwise.errors import LedgerError
from clipwise.ledger import multi_run
from clipwise.ledger.ledger import MemoryLedger
from clipwise.report.statement import of_ledger
from tests.cli.calls import clipwise
from tests.runs import network, private_run, train

pytestmark = pytest.mark.usefixtures("one_thread")


def with_dropout(ledger: Path | None = None, seed: int | None = 7) -> tuple[torch.Tensor, Private]:
    """One noised gradient of a network with dropout, without a manual torch seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3))
        torch.seed()
        model, private = private_run(model, ledger=ledger, seed=seed, sampling="full", noise_multiplier=100.0)
        x, y = next(iter(private.loader))
        private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads) * private.divisor, private


def test_the_noise_of_two_seeded_executions_cancels_and_nothing_is_claimed(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    (one, first), (other, second) = (with_dropout(path) for path in paths)
    fresh = [with_dropout(seed=None)[0] for _ in range(2)]
    assert 0 < float((one - other).norm()) < 0.01 * float((fresh[0] - fresh[1]).norm())
    for private in (first, second):
        said = private.statement()
        assert said.spent == private.spent() and private.spent().reproducible
        assert str(private.spent()).startswith("no guarantee: seeded; with a fresh key epsilon=")
        headline = str(said).splitlines()[1]
        assert headline.startswith("  guarantee    none is claimed: noise and sampling come from a given seed")
        plain = said.to_dict()
        assert plain["guarantee"] is None and plain["seeded"] is True
        assert plain["figures_with_a_fresh_key"] == {"epsilon": said.spent.epsilon, "delta": said.spent.delta}
        private.close()
    with pytest.raises(LedgerError, match=r"one and .*two have releases with the same noise key: .*cancels"):
        multi_run.read_files(paths)
    assert "none is claimed" in str(of_ledger(paths[0]))


def test_a_run_without_a_seed_claims_what_it_did() -> None:
    model, private = private_run()
    train(model, private, 2)
    said = private.statement()
    assert not private.spent().reproducible and "no guarantee" not in str(private.spent())
    assert said.to_dict()["guarantee"] == {"epsilon": said.spent.epsilon, "delta": said.spent.delta}
    assert said.to_dict()["figures_with_a_fresh_key"] is None
    assert "claimed" not in str(said)


def test_one_seed_is_one_key_whatever_it_is_used_for() -> None:
    keys = [
        private_run(seed=3)[1]._context.keys.key.id,
        private_run(seed=3, noise_multiplier=2.0, batch_size=10, augmentation_multiplicity=2)[1]._context.keys.key.id,
        private_run(network(seed=9), seed=3)[1]._context.keys.key.id,
    ]
    assert len(set(keys)) == 1 and private_run(seed=4)[1]._context.keys.key.id != keys[0]
    assert private_run()[1]._context.keys.key.id != private_run()[1]._context.keys.key.id


# The mark stays


def test_the_mark_goes_through_checkpoints_and_ledgers(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "ledger", seed=1)
    train(model, private, 2)
    state = private.state_dict()
    private.close()
    _, later = private_run(model, ledger=tmp_path / "ledger")  # resumed without a seed
    later.load_state_dict(state)
    train(model, later, 1)
    assert later.spent().reproducible and later.statement().seeded
    later.close()
    assert of_ledger(tmp_path / "ledger").seeded
    joined = FileLedger(tmp_path / "ledger", join=True)
    model, private = private_run(ledger=joined)  # another run in the same ledger
    assert private.spent().reproducible
    train(model, private, 1)
    state = private.state_dict()
    private.close()
    _, moved = private_run(model)
    with pytest.warns(UserWarning, match="fresh secret"):
        moved.load_state_dict(state)  # including all earlier releases
    assert moved.spent().reproducible and moved.statement().seeded


@pytest.mark.parametrize("command", [["epsilon", "--ledger"], ["tradeoff", "--ledger"], ["statement"]])
@pytest.mark.parametrize("seed", [None, 1])
def test_commands_show_the_mark(tmp_path: Path, command: list[str], seed: int | None) -> None:
    model, private = private_run(ledger=tmp_path / "ledger", seed=seed)
    train(model, private, 2)
    private.close()
    said = " ".join(clipwise(*command, tmp_path / "ledger").stdout.split())
    assert ("none is claimed: noise and sampling come from a given seed" in said) == (seed is not None)
    assert "In words" not in said or seed is None


def test_figures_for_machines_show_the_mark(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "ledger", seed=1)
    train(model, private, 1)
    private.close()
    said = clipwise("tradeoff", "--json", "--ledger", tmp_path / "ledger").stdout
    assert json.loads(said)["seeded"] is True


# Each key is used once


def test_a_second_execution_on_the_same_ledger_is_refused(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "ledger", seed=1)
    train(model, private, 1)
    private.close()
    _, private = private_run(ledger=tmp_path / "ledger", seed=1)  # the same program again
    with private, pytest.raises(LedgerError, match="another run"):
        next(iter(private.loader))
    with (
        FileLedger(tmp_path / "ledger", join=True) as joined,
        pytest.raises(LedgerError, match=r"same noise key.*cancels"),
    ):
        private_run(ledger=joined, seed=1)
    with FileLedger(tmp_path / "ledger", join=True) as joined:
        private_run(ledger=joined, seed=2)


def test_two_runs_of_one_seed_in_one_ledger_are_refused_before_a_release() -> None:
    shared = MemoryLedger()
    (model, first), (other, second) = (private_run(ledger=shared, seed=1) for _ in range(2))
    train(model, first, 1)
    with pytest.raises(LedgerError, match="same noise key"):
        train(other, second, 1)
    assert shared.position == 1
    train(model, first, 1)  # its key differs from other runs' keys


def test_a_run_without_releases_may_start_again(tmp_path: Path) -> None:
    for _ in range(2):
        _, private = private_run(ledger=tmp_path / "ledger", seed=1)
        private._context.ledger.describe(
            describe.about(private._context).to_dict()
        )  # as after a crash before the first release
        private._context.ledger._file.close()  # type: ignore[attr-defined]


def test_the_id_is_public_and_that_of_the_whole_run(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "ledger")
    secret, name = private._context.keys.key.secret_bytes(), private._context.keys.key.id
    train(model, private, 3)
    state = private.state_dict()
    assert private._context.keys.key.id == name and len(name) == 32 and name not in secret.hex()
    private.close()
    _, again = private_run(model, ledger=tmp_path / "ledger")
    again.load_state_dict(state)  # exactly where it stopped
    assert again._context.keys.key.id == name
    train(model, again, 1)
    again.close()
    assert {about["key"] for about in multi_run.read_files([tmp_path / "ledger"])[0].about} == {name}


def test_one_resume_file_in_two_ledgers_is_found(tmp_path: Path) -> None:
    """A copy cannot be recognised on reading, but the ledgers show it."""
    model, private = private_run(resume_file=tmp_path / "secrets")
    train(model, private, 2)
    state, weights = private.state_dict(), model.state_dict()
    private.close()
    shutil.copy(tmp_path / "secrets", tmp_path / "copy")
    paths = []
    for name in ("secrets", "copy"):
        model, later = private_run(ledger=tmp_path / f"{name}.ledger", resume_file=tmp_path / name)
        model.load_state_dict(weights)
        later.load_state_dict(state)
        train(model, later, 1)
        later.close()
        paths.append(later._context.ledger.path)  # type: ignore[attr-defined]
    with pytest.raises(LedgerError, match="same noise key"):
        multi_run.read_files(paths)


def test_only_one_thread_gets_the_resume_file(tmp_path: Path) -> None:
    for _ in range(20):
        secrets = checkpoint.Secrets("run", 1, "f", "d", "m", "key", "epoch", "id")
        checkpoint.write_secrets(tmp_path / "secrets", secrets)
        taken: list[checkpoint.Secrets | None] = []
        ready = threading.Barrier(4)

        def take(ready: threading.Barrier = ready, taken: list[checkpoint.Secrets | None] = taken) -> None:
            ready.wait()
            taken.append(checkpoint.take_secrets(tmp_path / "secrets"))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for each in [*(t.start for t in threads), *(t.join for t in threads)]:
            each()
        assert sorted(map(repr, taken)) == ["None", "None", "None", "Secrets(<secret>)"]
        assert not list(tmp_path.iterdir())
