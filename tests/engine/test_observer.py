"""The interface for audits: which runs are observed, and what an observed run does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from clipwise.engine import compiled, observer
from clipwise.engine.context import StepContext
from clipwise.engine.observer import Observer, observing
from clipwise.noise.key import NoiseKey
from clipwise.sampling.base import Indices
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.loader import PrivateLoader
from clipwise.sampling.schemes import make_scheme
from tests.runs import gradients, losses_of, private_run, same, train


class WithKey(Observer):
    """Changes nothing, and gives the same key each time."""

    def begins(self, run: StepContext) -> NoiseKey:
        return NoiseKey.from_seed(0, b"watch")


class WithoutFirst(WithKey):
    def kept(self, run: StepContext, drawn: Indices) -> Indices:
        return drawn[drawn != 0]


def test_no_observer_by_default_or_afterwards() -> None:
    assert observer.current() is None
    _, before = private_run()
    with observing(Observer()):
        _, inside = private_run()
    _, after = private_run()
    assert (
        before._context.observer is None
        and after._context.observer is None
        and isinstance(inside._context.observer, Observer)
    )


def test_an_observed_run_writes_no_file_and_states_that_its_noise_is_known(tmp_path: Path) -> None:
    with observing(Observer()):
        model, private = private_run(ledger=tmp_path / "ledger", resume_file=tmp_path / "resume")
        train(model, private, 2)
        assert private.statement().seeded
        private.close()
    assert list(tmp_path.iterdir()) == []


def test_looking_on_changes_nothing_but_the_key() -> None:
    with observing(WithKey()):
        model, private = private_run()
    train(model, private, 3)
    again, plain = private_run()
    plain._context.keys.key = NoiseKey.from_seed(0, b"watch")
    train(again, plain, 3)
    assert same(gradients(model), gradients(again))


def test_a_unit_that_is_left_out_is_as_if_never_drawn() -> None:
    for looking in (WithKey(), WithoutFirst()):
        with observing(looking):
            model, private = private_run(sampling="full", max_physical_batch_size=16)
        sizes = []
        for x, y in private.loader.pieces():
            sizes.append(len(x))
            private.step(losses_of(model, (x, y)))
        assert sum(sizes) == (40 if type(looking) is WithKey else 39)


def test_an_audit_may_remove_a_whole_batch() -> None:
    scheme, secrets = make_scheme("fixed-size", 10, 4), [(b"a", b"b", 0)]
    fetcher = Fetcher(TensorDataset(torch.arange(10)))
    (whole,) = next(iter(PrivateLoader(scheme, fetcher, lambda: iter(secrets))))
    (rest,) = next(iter(PrivateLoader(scheme, fetcher, lambda: iter(secrets), kept=lambda drawn: drawn[:0])))
    assert len(whole) == 4 and len(rest) == 0


def test_a_watched_step_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_can_capture", lambda device: True)
    with observing(Observer()):
        model, private = private_run()
    again, plain = private_run()
    assert private.compiled(lambda x, y: losses_of(model, (x, y)))._stays_eager
    assert not plain.compiled(lambda x, y: losses_of(again, (x, y)))._stays_eager
