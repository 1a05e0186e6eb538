"""A run resumes where it stopped, bit for bit if possible. No secret is published or used twice."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import PerExample, Private, accounting
from clipwise.engine import checkpoint
from clipwise.errors import BudgetExhausted, CheckpointError, LedgerError, PrivacyWarning, StepError
from clipwise.ledger import ledger
from clipwise.noise.key import NoiseKey
from tests.runs import data, losses_of, network, parameters, private_run, same, sgd, train

STEPS = 12

pytestmark = pytest.mark.usefixtures("one_thread")


class Place:
    """Where a run keeps its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger, self.checkpoint = folder / "run.ledger", folder / "run.pt"
        self.resume_file = folder / "run.ledger.resume"

    def begin(self, kind: str = "sgd", lr: float = 0.3, **options: Any) -> tuple[nn.Module, Private]:
        model = network(seed=options.pop("model_seed", 0))
        optimizer = sgd(model, lr=lr, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(model.parameters(), lr=lr)
        return private_run(model, optimizer, **{"ledger": self.ledger, **options})

    def save(self, model: nn.Module, private: Private) -> None:
        checkpoint.save(self.checkpoint, {"model": model.state_dict(), "private": private.state_dict()})

    def go_on(self, fresh: bool = False, **options: Any) -> tuple[nn.Module, Private]:
        """Objects as a new process would make them, loaded; `fresh` says whether a fresh key is expected."""
        model, private = self.begin(**{"model_seed": 99, **options})
        state = checkpoint.load(self.checkpoint)
        model.load_state_dict(state["model"])
        if fresh:
            with pytest.warns(PrivacyWarning, match="fresh secret"):
                private.load_state_dict(state["private"])
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error", PrivacyWarning)
                private.load_state_dict(state["private"])
        return model, private


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def twin_of(private: Private, kind: str, **options: Any) -> tuple[nn.Module, Private]:
    """A run in memory with the same key, never interrupted."""
    model, twin = Place(Path()).begin(kind, **{**options, "ledger": None})
    twin._context.keys.key = NoiseKey(private._context.keys.key.secret_bytes())
    return model, twin


def secret(private: Private) -> bytes:
    return private._context.keys.key.secret_bytes()


# Bit for bit


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled", "fixed-size"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("stops", [(3,), (5,), (2, 5, 8)])
def test_a_clean_stop_changes_nothing(
    place: Place, seed: int | None, sampling: str, kind: str, stops: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {"sampling": sampling, "seed": seed}
    model, private = place.begin(kind, **options)
    straight, twin = twin_of(private, kind, **options)
    train(straight, twin, STEPS)
    done = 0
    for stop in stops:
        train(model, private, stop - done)
        done = stop
        place.save(model, private)
        private.close()
        model, private = place.go_on(kind=kind, **options)
        assert private._context.ledger.position == done
    train(model, private, STEPS - done)
    assert same(parameters(model), parameters(straight))
    assert private._context.ledger.history() == twin._context.ledger.history()
    assert private.state_dict()["slot"] == twin.state_dict()["slot"]


def test_a_stop_in_the_middle_of_a_batch_draws_that_batch_again(place: Place) -> None:
    options: dict[str, Any] = {"sampling": "shuffled", "max_physical_batch_size": 3}
    model, private = place.begin(**options)
    straight, twin = twin_of(private, "sgd", **options)
    train(straight, twin, 4)
    train(model, private, 2)
    assert private.step(losses_of(model, next(iter(private.loader.pieces())))) is False
    place.save(model, private)
    private.close()
    model, private = place.go_on(**options)
    train(model, private, 2)
    assert same(parameters(model), parameters(straight))


@pytest.mark.slow
def test_a_scheduler_does_not_interfere(place: Place) -> None:
    """The learning rate has changed since the beginning: that is no other configuration."""

    def scheduled(private: Private) -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(private.optimizer, step_size=2, gamma=0.5)

    def go(model: nn.Module, private: Private, scheduler: Any, steps: int) -> None:
        for _ in range(steps):
            train(model, private, 1)
            scheduler.step()

    model, private = place.begin()
    straight, twin = twin_of(private, "sgd")
    go(straight, twin, scheduled(twin), 8)
    scheduler = scheduled(private)
    go(model, private, scheduler, 5)
    place.save(model, private)
    private.close()
    model, private = place.begin(model_seed=99)
    again = scheduled(private)
    state = checkpoint.load(place.checkpoint)
    model.load_state_dict(state["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        private.load_state_dict(state["private"])
    again.load_state_dict(scheduler.state_dict())
    go(model, private, again, 3)
    assert same(parameters(model), parameters(straight))


def test_the_optimizer_s_settings_come_from_the_checkpoint(place: Place) -> None:
    """Another lr given to the new optimizer is overwritten, as everywhere in torch: the run is the same."""
    model, private = place.begin(lr=0.3)
    straight, twin = twin_of(private, "sgd", lr=0.3)
    train(straight, twin, 6)
    train(model, private, 3)
    place.save(model, private)
    private.close()
    model, private = place.go_on(lr=0.7)
    train(model, private, 3)
    assert same(parameters(model), parameters(straight))


def test_a_run_in_memory_continues_through_a_resume_file_of_its_own(place: Place) -> None:
    options = {"ledger": None, "resume_file": place.folder / "secrets"}
    model, private = place.begin(**options)
    straight, twin = twin_of(private, "sgd")
    train(straight, twin, 6)
    train(model, private, 3)
    place.save(model, private)
    private.close()
    model, private = place.go_on(**options)
    train(model, private, 3)
    assert same(parameters(model), parameters(straight))
    assert [entry.count for entry in private._context.ledger.history()] == [3, 3]


# Nothing secret is published


def serialized(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def holds(text: bytes, secret_bytes: bytes) -> bool:
    return secret_bytes in text or secret_bytes.hex().encode() in text


@pytest.mark.parametrize("seed", [None, 12345678901])
def test_a_checkpoint_holds_no_secret(place: Place, seed: int | None) -> None:
    model, private = place.begin("adam", sampling="shuffled", seed=seed)
    keys = []
    for _ in range(4):
        keys += [
            secret(private),
            private._context.keys.key.derive("sampling"),
            private._context.keys.key.derive("noise/0/0"),
        ]
        train(model, private, 1)
    keys += [secret(private), private._context.keys.epoch]
    state = private.state_dict()
    published = serialized(state) + repr(state).encode() + json.dumps(private.statement().to_dict()).encode()
    place.save(model, private)
    private.close()
    published += place.checkpoint.read_bytes() + place.ledger.read_bytes()
    assert not any(holds(published, key) for key in keys)
    assert seed is None or str(seed).encode() not in published
    kept = place.resume_file.read_bytes()
    assert holds(kept, keys[-2]) and holds(kept, keys[-1])  # so that the search can find something
    assert not any(holds(kept, key) for key in keys[:-2])  # not even the owner can go back


def test_a_checkpoint_is_plain_data(place: Place) -> None:
    model, private = place.begin("adam")
    train(model, private, 3)
    state = private.state_dict()
    loaded = torch.load(io.BytesIO(serialized(state)), weights_only=True)
    assert loaded.keys() == state.keys() and loaded["configuration"] == state["configuration"]
    json.dumps({**state, "optimizer": None})


def test_a_run_and_its_key_cannot_be_pickled(place: Place) -> None:
    _, private = place.begin()
    with pytest.raises(StepError, match="cannot be copied or pickled"):
        pickle.dumps(private)
    with pytest.raises(StepError, match="cannot be copied or pickled"):
        copy.deepcopy(private)
    assert repr(checkpoint.Secrets("run", 1, "f", "d", "m", "key", "epoch")) == "Secrets(<secret>)"


def test_the_resume_file_is_for_its_owner_and_for_one_use(place: Place) -> None:
    before = os.umask(0)
    try:
        model, private = place.begin()
        train(model, private, 3)
        place.save(model, private)
        assert not place.resume_file.exists()
        private.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.resume_file.stat().st_mode) == 0o600
    place.go_on()
    assert not place.resume_file.exists()
    assert sorted(p.name for p in place.folder.iterdir()) == ["run.ledger", "run.pt"]


def test_a_run_that_released_nothing_leaves_no_resume_file(place: Place) -> None:
    _, private = place.begin()
    private.close()
    assert not place.resume_file.exists()


# A fresh key wherever the old noise could be added to another sum


def stopped(place: Place, steps: int = 3, after: int = 0, **options: Any) -> bytes:
    """A run saved after `steps`, closed `after` more; its secret at the end."""
    model, private = place.begin(**options)
    train(model, private, steps)
    place.save(model, private)
    train(model, private, after)
    last = secret(private)
    private.close()
    return last


def test_releases_after_the_checkpoint_stay_counted_and_are_made_again(place: Place) -> None:
    model, private = place.begin(seed=3)
    train(model, private, 3)
    place.save(model, private)
    at_checkpoint = secret(private)
    train(model, private, 2)
    straight = parameters(model)
    private.close()
    with pytest.warns(PrivacyWarning, match="2 releases after the checkpoint stay counted"):
        model, private = place.begin(seed=3, model_seed=99)
        state = checkpoint.load(place.checkpoint)
        model.load_state_dict(state["model"])
        private.load_state_dict(state["private"])
    assert private._context.ledger.position == 5
    assert secret(private) != at_checkpoint
    train(model, private, 2)
    assert not same(parameters(model), straight)
    assert [entry.count for entry in private._context.ledger.history()] == [5, 2]


def test_after_a_crash_the_whole_reservation_stays_counted(place: Place) -> None:
    model, private = place.begin()
    train(model, private, 3)
    place.save(model, private)
    train(model, private, 2)  # blocks of 1, 2 and 4 releases
    private._context.ledger._file.close()  # type: ignore[attr-defined]
    model, private = place.go_on(fresh=True)
    assert private._context.ledger.position == 7
    train(model, private, 1)
    assert private._context.ledger.position == 8


def changed_data() -> TensorDataset:
    changed = data()
    changed.tensors[0][0, 0] += 1
    return changed


@pytest.mark.parametrize(
    "changed",
    [
        {"clipping": PerExample(2.0)},
        {"clipping": PerExample(1.0, parts="layer")},
        {"noise_multiplier": 1.1},
        {"batch_size": 10},
        {"sampling": "fixed-size"},
        {"noise": "secure"},
        {"dataset": changed_data()},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_configuration_takes_a_fresh_key(place: Place, changed: dict[str, Any]) -> None:
    last = stopped(place)
    if changed == {"noise": "secure"}:
        pytest.importorskip("cryptography")
    _, private = place.go_on(fresh=True, **changed)
    assert secret(private) != last and not place.resume_file.exists()
    assert private._context.ledger.position == 3


@pytest.mark.parametrize("setting", ["lr", "momentum", "weight_decay"])
def test_another_setting_in_the_checkpoint_takes_a_fresh_key(place: Place, setting: str) -> None:
    last = stopped(place)
    state = checkpoint.load(place.checkpoint)
    state["private"]["optimizer"]["param_groups"][0][setting] += 0.01
    checkpoint.save(place.checkpoint, state)
    _, private = place.go_on(fresh=True)
    assert secret(private) != last


def test_other_betas_in_the_checkpoint_take_a_fresh_key(place: Place) -> None:
    last = stopped(place, kind="adam")
    state = checkpoint.load(place.checkpoint)
    state["private"]["optimizer"]["param_groups"][0]["betas"] = (0.5, 0.999)
    checkpoint.save(place.checkpoint, state)
    _, private = place.go_on(fresh=True, kind="adam")
    assert secret(private) != last


def test_the_same_checkpoint_a_second_time_takes_a_fresh_key(place: Place, tmp_path: Path) -> None:
    last = stopped(place)
    copied = Place(tmp_path / "copy")
    copied.folder.mkdir()
    _, private = place.go_on()
    assert secret(private) == last
    for file in (place.ledger, place.checkpoint):
        shutil.copy(file, copied.folder)
    _, again = copied.go_on(fresh=True)
    assert secret(again) != last
    private._context.ledger._file.close()  # type: ignore[attr-defined]
    _, private = place.go_on(fresh=True)
    assert secret(private) != last


def test_a_resume_file_that_was_put_back_is_not_used(place: Place) -> None:
    """Its noise was seen: the ledger is past it."""
    last = stopped(place)
    kept = place.resume_file.read_bytes()
    model, private = place.go_on()
    train(model, private, 1)
    private._context.ledger._file.close()  # type: ignore[attr-defined]
    place.resume_file.write_bytes(kept)
    _, private = place.go_on(fresh=True)
    assert secret(private) != last and not place.resume_file.exists()


def test_a_fresh_key_begins_a_shuffled_pass_again(place: Place) -> None:
    stopped(place, steps=3, after=1, sampling="shuffled")
    model, private = place.go_on(fresh=True, sampling="shuffled")
    seen: list[int] = []
    for batch in private.loader:
        seen += private.loader.current.indices.tolist()  # type: ignore[union-attr]
        private.step(losses_of(model, batch))
    assert sorted(seen) == list(range(40))
    assert [entry.count for entry in private._context.ledger.history()] == [4, 5]


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"run": 1}', b"\0" * 100])
def test_a_damaged_resume_file_is_not_used(place: Place, garbage: bytes) -> None:
    last = stopped(place)
    place.resume_file.write_bytes(garbage)
    _, private = place.go_on(fresh=True)
    assert secret(private) != last and not place.resume_file.exists()


# Ledgers and checkpoints that do not belong together


def assert_refuses(private: Private, state: Any, kind: type[Exception], match: str) -> None:
    """With an error, and without having changed anything."""
    before = copy.deepcopy(private.state_dict())
    with pytest.raises(kind, match=match):
        private.load_state_dict(state)
    after = private.state_dict()
    assert repr({**before, "optimizer": None}) == repr({**after, "optimizer": None})
    assert serialized(before["optimizer"]) == serialized(after["optimizer"])


def test_the_checkpoint_of_another_run(place: Place, tmp_path: Path) -> None:
    stopped(place)
    other = Place(tmp_path / "other")
    stopped(other, steps=4)
    _, private = place.begin()
    state = checkpoint.load(other.checkpoint)["private"]
    assert_refuses(private, state, LedgerError, "another run.*give make_private the ledger")
    with pytest.raises(LedgerError, match="load_state_dict"):
        next(iter(private.loader))


@pytest.mark.parametrize("kept", [0, 2])
def test_a_ledger_that_is_behind_the_checkpoint(place: Place, kept: int) -> None:
    model, private = place.begin()
    train(model, private, kept)
    private.close()
    old = place.ledger.read_bytes()
    place.save(model, private)
    model, private = place.go_on(fresh=True) if kept == 0 else place.go_on()
    train(model, private, 3)
    place.save(model, private)
    private.close()
    place.ledger.write_bytes(old)
    _, private = place.begin()
    state = checkpoint.load(place.checkpoint)["private"]
    assert_refuses(private, state, LedgerError, "fewer releases.*complete ledger")


def test_a_new_ledger_takes_over_the_history(place: Place) -> None:
    model, private = place.begin()
    train(model, private, 3)
    place.save(model, private)
    spent = private.spent()
    private.close()
    for where in (None, place.folder / "new.ledger"):
        model, private = place.go_on(fresh=True, ledger=where)
        assert private.spent() == spent and spent.steps == 3
        train(model, private, 1)
        assert private.spent().epsilon > spent.epsilon
        private.close()
    assert ledger.read(place.folder / "new.ledger").position == 4


def test_a_state_goes_back_into_its_own_run(place: Place) -> None:
    """Rolled back in one process: a fresh key, and every release stays counted."""
    model, private = place.begin(ledger=None)
    train(model, private, 2)
    state, weights = copy.deepcopy(private.state_dict()), copy.deepcopy(model.state_dict())
    train(model, private, 3)
    iterator = iter(private.loader)
    next(iterator)
    before = secret(private)
    with pytest.raises(CheckpointError, match=r"does not hold the weights.*model.load_state_dict"):
        private.load_state_dict(state)
    model.load_state_dict(weights)
    with pytest.warns(PrivacyWarning, match="3 releases"):
        private.load_state_dict(state)
    assert secret(private) != before
    with pytest.raises(StepError):
        next(iterator)
    train(model, private, 1)
    assert private._context.ledger.position == 6


# Files and states that are no checkpoint


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code was run",))


def test_a_file_that_is_no_checkpoint(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    stopped(place)
    good = place.checkpoint.read_bytes()
    spoiled: list[bytes] = [good[: len(good) * k // 7] for k in range(7)]
    spoiled += [b"no checkpoint at all", os.urandom(1000), pickle.dumps(Evil(), protocol=2), serialized([1, 2, 3])]
    for content in spoiled:
        place.checkpoint.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"run\.pt"):
            checkpoint.load(place.checkpoint)
    place.checkpoint.unlink()
    with pytest.raises(CheckpointError, match="the checkpoint does not exist"):
        checkpoint.load(place.checkpoint)
    with pytest.raises(CheckpointError):
        checkpoint.load(place.folder)
    assert capsys.readouterr().out == ""


def broken(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**state, **changes}.items() if value is not ...}


def test_a_state_that_is_no_state(place: Place) -> None:
    stopped(place)
    model, private = place.begin()
    saved = checkpoint.load(place.checkpoint)
    good = saved["private"]
    event = good["history"][0]["event"]
    for state in (
        {},
        [],
        None,
        network().state_dict(),
        broken(good, format=1),
        broken(good, declared=[["public"]]),
        broken(good, weights={"0.weight": "1"}),
        broken(good, made=None),
        broken(good, made=()),
        broken(good, tag=None),
        *(broken(good, **{key: ...}) for key in good),
        broken(good, position=4),
        broken(good, history=[]),
        broken(good, format=np.array([1.0, 2.0])),
        broken(good, history=torch.ones(3)),
        broken(good, position=np.array([1.0, 2.0])),
        broken(good, history=[{"event": event}]),
        broken(good, history=[{"event": {**event, "sampling": "lottery"}, "count": 3}]),
        broken(good, history=[{"event": {**event, "noise_multiplier": -1.0}, "count": 3}]),
    ):
        assert_refuses(private, state, CheckpointError, "state_dict")
    model.load_state_dict(saved["model"])
    private.load_state_dict(good)
    assert private._context.ledger.position == 3


def test_a_state_of_another_model_or_optimizer(place: Place) -> None:
    """Even for a run in memory, without a ledger file."""
    stopped(place)
    good = checkpoint.load(place.checkpoint)["private"]
    model = nn.Linear(5, 3)
    _, private = private_run(model, sgd(model, momentum=0.9))
    assert_refuses(private, good, CheckpointError, "another parameters")
    _, private = place.begin("adam", ledger=None)
    assert_refuses(private, good, CheckpointError, "another optimizer")


def test_a_failed_save_leaves_the_old_checkpoint(place: Place) -> None:
    checkpoint.save(place.checkpoint, {"a": 1})
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        checkpoint.save(place.checkpoint, {"a": lambda: 1})
    assert checkpoint.load(place.checkpoint) == {"a": 1}
    assert [p.name for p in place.folder.iterdir()] == ["run.pt"]


# The budget continues too


EPSILON, DELTA = 2.0, 1e-5


def until_exhausted(model: nn.Module, private: Private) -> None:
    """Train for ever; at the end nothing was changed or charged for the step that did not fit."""
    before: dict[str, Tensor] = {}
    position = 0
    with pytest.raises(BudgetExhausted, match="epsilon=2 at delta=1e-05"):
        for _ in range(100):
            before, position = parameters(model), private._context.ledger.position
            train(model, private, 1)
    assert same(before, parameters(model)) and private._context.ledger.position == position
    with pytest.raises(BudgetExhausted):
        train(model, private, 1)
    assert private.spent().epsilon <= EPSILON


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "shuffled"])
@pytest.mark.parametrize("end", ["straight", "clean", "crash", "rolled back", "new ledger"])
def test_the_budget_is_kept_however_the_run_was_stopped(place: Place, sampling: str, end: str) -> None:
    """10 steps are planned: two passes of the shuffled loader."""
    options = {"sampling": sampling, "epsilon": EPSILON, "delta": DELTA, "epochs": 2}
    model, private = place.begin(**options)
    train(model, private, 3)
    if end != "straight":
        place.save(model, private)
        train(model, private, 1 if end == "rolled back" else 0)
        if end == "crash":
            private._context.ledger._file.close()  # type: ignore[attr-defined]
        else:
            private.close()
        where = place.folder / "new.ledger" if end == "new ledger" else place.ledger
        model, private = place.go_on(fresh=end != "clean", ledger=where, **options)
    until_exhausted(model, private)
    if end in ("straight", "clean"):
        assert private._context.ledger.position >= 10
    private.close()
    file = place.folder / "new.ledger" if end == "new ledger" else place.ledger
    assert accounting.epsilon_of(ledger.read(file).history, DELTA) <= EPSILON


@pytest.mark.slow
def test_a_budget_counts_what_a_joined_ledger_holds(place: Place) -> None:
    stopped(place, steps=8, noise_multiplier=2.0)
    open_ledger = ledger.FileLedger(place.ledger, join=True)
    model, private = place.begin(ledger=open_ledger, epsilon=EPSILON, delta=DELTA, epochs=2)
    train(model, private, 10)  # the planned steps fit beside those of the other run
    until_exhausted(model, private)
    assert 18 <= private._context.ledger.position <= 20
    assert private.spent().accountant == "renyi-filter" and 1.9 < private.spent().epsilon <= EPSILON


def test_what_is_no_state_and_where_nothing_can_be_written(tmp_path: Path) -> None:
    for other in (nn.Linear(2, 2), None, [1]):
        with pytest.raises(CheckpointError, match=r"holds a state_dict, not a .*private\.state_dict\(\)"):
            checkpoint.save(tmp_path / "x", other)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "x"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            checkpoint.save(path, {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
