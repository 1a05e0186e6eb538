"""Epsilon agrees with independent computations, for the events of actual runs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from clipwise import Batch, PerExample, Private, accounting
from clipwise.ledger import ledger
from clipwise.privacy import Adjacency, Sampling
from tests.runs import SIZE, losses_of, private_run, train

DELTA = 1e-5

pytestmark = pytest.mark.usefixtures("one_thread")


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The closed form of the Gaussian mechanism, solved by bisection."""
    normal = NormalDist()

    def delta_at(epsilon: float) -> float:
        return normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)

    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def library_epsilon(z: float, rate: float, steps: int, replace_one: bool) -> float:
    """dp-accounting's own PLD. Under REPLACE_ONE it counts noise over the norm of one record, half of ours."""
    relation = (
        dp_accounting.NeighboringRelation.REPLACE_ONE
        if replace_one
        else dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    one = pld.from_gaussian_mechanism(
        2 * z if replace_one else z,
        sampling_prob=rate,
        value_discretization_interval=1e-4,
        neighboring_relation=relation,
    )
    return float(one.self_compose(steps).get_epsilon_for_delta(DELTA))


def run(steps: int, **options: Any) -> Private:
    model, private = private_run(delta=DELTA, **options)
    train(model, private, steps)
    return private


@pytest.mark.parametrize(("z", "steps"), [(1.0, 3), (2.0, 9), (0.6, 1)])
def test_poisson(z: float, steps: int) -> None:
    spent = run(steps, noise_multiplier=z).spent()
    assert spent.epsilon == pytest.approx(library_epsilon(z, 8 / SIZE, steps, replace_one=False), rel=5e-3)
    assert (spent.adjacency, spent.sampling, spent.steps) == (Adjacency.ZERO_OUT, Sampling.POISSON, steps)


@pytest.mark.parametrize("sampling", ["fixed-size", "partition"])
def test_fixed_size_and_partition(sampling: str) -> None:
    """Amplification by a fixed-size subset equals that of the same rate, with noise relative to 2C."""
    clipping = Batch(1.0) if sampling == "partition" else PerExample(1.0)
    private = run(4, sampling=sampling, noise_multiplier=1.2, clipping=clipping)
    (part,) = private.parts()
    assert part.noise_std == pytest.approx(1.2 * 2 * 1.0)
    spent = private.spent()
    upper = gaussian_epsilon(math.sqrt(4) / 1.2, DELTA)  # no amplification at all
    amplified = library_epsilon(1.2, 8 / SIZE, 4, replace_one=True)
    assert amplified * 0.995 <= spent.epsilon < upper
    assert spent.adjacency is Adjacency.REPLACE_ONE


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_full_batches(adjacency: str) -> None:
    private = run(3, sampling="full", adjacency=adjacency, noise_multiplier=1.5)
    assert private.spent().epsilon == pytest.approx(gaussian_epsilon(math.sqrt(3) / 1.5, DELTA), rel=1e-4)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("steps", [1, 5, 6, 11])
def test_shuffled_is_never_counted_as_poisson(adjacency: str, steps: int) -> None:
    """One Gaussian release per started pass, and no amplification."""
    private = run(steps, sampling="shuffled", adjacency=adjacency, noise_multiplier=1.5)
    history = private._context.ledger.history()
    assert {entry.event.sampling for entry in history} == {Sampling.SHUFFLED}
    assert {entry.event.period for entry in history} == {5}
    passes = math.ceil(steps / 5)
    assert private.spent().epsilon == pytest.approx(gaussian_epsilon(math.sqrt(passes) / 1.5, DELTA), rel=1e-4)
    assert private.spent().epsilon > 1.2 * library_epsilon(1.5, 1 / 5, steps, replace_one=False)
    factor = 1 if adjacency == "zero-out" else 2
    assert private.parts()[0].sensitivity == factor


def test_a_shuffled_epoch_takes_every_record_once() -> None:
    """This justifies counting passes."""
    model, private = private_run(sampling="shuffled", batch_size=7)
    for _ in range(3):
        taken: Counter[int] = Counter()
        for batch in private.loader:
            taken.update(private.loader.current.indices.tolist())  # type: ignore[union-attr]
            private.step(losses_of(model, batch))
        assert taken == Counter(range(SIZE))


def test_a_poisson_batch_takes_every_record_at_the_stated_rate() -> None:
    """The event's rate is the sampler's rate."""
    model, private = private_run(sample_rate=0.25, seed=1)
    taken: Counter[int] = Counter()
    steps = 160
    for _ in range(steps // 4):
        for batch in private.loader:
            taken.update(private.loader.current.indices.tolist())  # type: ignore[union-attr]
            private.step(losses_of(model, batch))
    (entry,) = private._context.ledger.history()
    assert (entry.count, entry.event.sample_rate) == (steps, 0.25)
    deviation = math.sqrt(SIZE * steps * 0.25 * 0.75)
    assert abs(sum(taken.values()) - 0.25 * SIZE * steps) < 4 * deviation
    assert all(abs(n - 0.25 * steps) < 5 * math.sqrt(steps * 0.25 * 0.75) for n in taken.values())


def test_the_ledger_file_gives_the_epsilon_of_the_run(tmp_path: Path) -> None:
    """An auditor needs nothing but the ledger."""
    private = run(5, ledger=tmp_path / "run.ledger")
    spent = private.spent()
    private.close()
    snapshot = ledger.read(tmp_path / "run.ledger")
    assert snapshot.position == spent.steps == 5
    assert accounting.epsilon_of(snapshot.history, DELTA) == pytest.approx(spent.epsilon)
    (entry,) = snapshot.history
    independent = library_epsilon(entry.event.noise_multiplier, entry.event.sample_rate, entry.count, False)
    assert spent.epsilon == pytest.approx(independent, rel=5e-3)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "shuffled"])
def test_noise_calibrated_for_a_budget_keeps_it(sampling: str) -> None:
    model, private = private_run(sampling=sampling, epsilon=1.5, delta=DELTA, epochs=2)
    train(model, private, 10)
    z, spent = private.noise_multiplier, private.spent()
    if sampling == "shuffled":
        independent = gaussian_epsilon(math.sqrt(2) / z, DELTA)
    else:
        independent = library_epsilon(z, 8 / SIZE, 10, replace_one=sampling == "fixed-size")
    assert spent.epsilon <= 1.5
    assert independent <= 1.5 * 1.005
    assert spent.epsilon > 1.5 * 0.98  # and not more noise than needed


def test_two_keys_cost_two_passes() -> None:
    """A shuffled epoch that is interrupted and restarted uses its records twice."""
    whole = run(4, sampling="shuffled", noise_multiplier=1.5)
    model, first = private_run(sampling="shuffled", noise_multiplier=1.5, delta=DELTA)
    train(model, first, 2)
    with pytest.warns(UserWarning, match="fresh secret"):
        first.load_state_dict(first.state_dict())
    train(model, first, 2)
    assert whole.spent().epsilon == pytest.approx(gaussian_epsilon(1 / 1.5, DELTA), rel=1e-4)
    assert first.spent().epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2) / 1.5, DELTA), rel=1e-4)
