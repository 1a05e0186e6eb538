"""Truncated Poisson sampling in a whole run: what is drawn, released, counted and reported."""

from __future__ import annotations

import pytest

from clipwise import PerExample, accounting
from clipwise.accounting import truncation
from clipwise.privacy import Sampling
from tests.runs import SIZE, losses_of, private_run, train

RUN = {"sampling": "truncated-poisson", "seed": 3}


def test_no_batch_is_larger_than_the_limit_and_the_run_is_accounted() -> None:
    model, private = private_run(**RUN, max_batch_size=10)
    sizes = []
    for _ in range(8):
        for batch in private.loader:
            sizes.append(len(batch[0]))
            private.step(losses_of(model, batch))
    assert max(sizes) == 10 and min(sizes) < 8  # cut, and not filled up
    (entry,) = private._context.ledger.history()
    assert (entry.event.sampling, entry.count) == (Sampling.TRUNCATED_POISSON, 40)
    assert entry.event.excess == truncation.excess(SIZE, 8 / SIZE, 10)
    with_cuts, plain = (
        private.spent(),
        accounting.epsilon(noise_multiplier=1.0, sample_rate=8 / SIZE, steps=40, delta=private.spent().delta),
    )
    assert with_cuts.epsilon > plain  # here infinite: so small a data set is cut in every third step


def test_by_default_it_costs_what_poisson_sampling_costs() -> None:
    costs = []
    for sampling in ("poisson", "truncated-poisson"):
        model, private = private_run(sampling=sampling, seed=3)
        train(model, private, 7)
        costs.append(private.spent().epsilon)
        assert private.spent().sampling is Sampling(sampling)
    assert costs[1] == pytest.approx(costs[0], rel=1e-5)


def test_noise_is_calibrated_for_the_cuts() -> None:
    _, private = private_run(**RUN, epsilon=2.0, delta=1e-3, steps=20, max_batch_size=24)
    _, plain = private_run(sampling="poisson", epsilon=2.0, delta=1e-3, steps=20)
    assert private.noise_multiplier > plain.noise_multiplier
    assert PerExample().unit == private.spent().unit
