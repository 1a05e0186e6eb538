from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest

from clipwise.accounting import accountants, gaussian, rdp
from clipwise.accounting.composition import Step
from clipwise.errors import UnsupportedEventError
from clipwise.ledger.ledger import MemoryLedger
from clipwise.privacy import Adjacency, Amplification, Entry

Make = Callable[..., Entry]
DELTA = 1e-5


@pytest.mark.parametrize(
    ("z", "rate", "steps", "epsilon"),
    [
        (1.1, 256 / 60000, 14062, 2.597),
        (0.925, 1024 / 60000, 586, 3.425),
        (1.759, 1024 / 60000, 586, 1.101),
        (2.447, 1024 / 60000, 352, 0.552),
        (0.7, 1024 / 60000, 59, 3.818),
        (4.0, 0.01, 10000, 1.036),
        (1.0, 0.01, 1000, 2.101),
    ],
)
def test_known_values(entry: Make, z: float, rate: float, steps: int, epsilon: float) -> None:
    assert accountants.epsilon_of([entry("poisson", rate, z, steps)], DELTA, "rdp") == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_noise_is_relative_to_the_sensitivity_of_the_adjacency(entry: Make, adjacency: Adjacency) -> None:
    exact = gaussian.epsilon(DELTA, 1 / 2.0)
    assert (
        exact <= accountants.epsilon_of([entry("full", 1.0, 2.0, 1, adjacency=adjacency)], DELTA, "rdp") <= 1.15 * exact
    )
    if adjacency is Adjacency.REPLACE_ONE:
        assert exact <= accountants.epsilon_of([entry("fixed-size", 1.0, 2.0, 1)], DELTA, "rdp") <= 1.15 * exact


@pytest.mark.slow
def test_fixed_size_divergence_of_order_two_pins_the_unit() -> None:
    """Wang, Balle, Kasiviswanathan: D_2 <= log(1 + q^2 min(4 (e^(1/z^2) - 1), 2 e^(1/z^2)))."""
    for rate, z in [(0.1, 1.0), (0.01, 0.5), (0.3, 4.0)]:
        found = rdp.of_step(Step(Amplification.WITHOUT_REPLACEMENT, rate, z))[list(rdp.ORDERS).index(2)]
        by_hand = math.log1p(rate**2 * min(4 * math.expm1(z**-2), 2 * math.exp(z**-2)))
        assert found == pytest.approx(by_hand, rel=1e-9)


def test_poisson_divergence_of_order_two_pins_the_unit() -> None:
    for rate, z in [(0.1, 1.0), (0.01, 0.5)]:
        found = rdp.of_step(Step(Amplification.POISSON, rate, z))[list(rdp.ORDERS).index(2)]
        assert found == pytest.approx(math.log1p(rate**2 * math.expm1(z**-2)), rel=1e-9)


def test_divergences_of_a_history_add_up(entry: Make) -> None:
    history = [entry("poisson", 0.01, 1.0, 300), entry("full", 1.0, 4.0, 2), entry("poisson", 0.01, 1.0, 200)]
    orders = rdp.ORDERS
    total = 500 * rdp.of_step(Step(Amplification.POISSON, 0.01, 1.0)) + orders * 2 / (2 * 16)
    by_hand = np.min(total + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1))
    assert accountants.epsilon_of(history, DELTA, "rdp") == pytest.approx(by_hand, rel=1e-9)


def test_shuffled_passes_are_counted(entry: Make) -> None:
    shuffled = entry("shuffled", 0.1, 2.0, 31, period=10)
    assert accountants.epsilon_of([shuffled], DELTA, "rdp") == accountants.epsilon_of(
        [entry("full", 1.0, 2.0, 4)], DELTA, "rdp"
    )


def test_delta_inverts_epsilon(entry: Make) -> None:
    history = [entry("poisson", 0.02, 1.2, 700)]
    assert accountants.delta_of(history, accountants.epsilon_of(history, DELTA, "rdp"), "rdp") == pytest.approx(
        DELTA, rel=1e-6
    )


@pytest.mark.parametrize("amplification", list(Amplification))
@pytest.mark.parametrize(("rate", "z"), [(0.1, 1e6), (1e-3, 1e5), (1e-9, 100.0), (1e-12, 1e6)])
def test_rounding_makes_no_step_cheaper(amplification: Amplification, rate: float, z: float) -> None:
    """Steps this small have divergence alpha q^2 / (2 z^2), near or below the rounding of its terms."""
    exact = rdp.ORDERS / 2 * (rate / z) ** 2
    assert (rdp.of_step(Step(amplification, rate, z)) >= exact * (1 - 1e-6)).all()


def test_no_noise_and_no_history(entry: Make) -> None:
    assert accountants.epsilon_of([], DELTA, "rdp") == 0 and accountants.delta_of([], 0.0, "rdp") == 0
    silent = [entry("poisson", 0.1, 0.0, 1)]
    assert accountants.epsilon_of(silent, DELTA, "rdp") == math.inf and accountants.delta_of(silent, 100.0, "rdp") == 1


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize(("z", "rate", "steps"), [(0.01, 0.1, 10**6), (1e6, 1e-12, 10**15), (0.3, 0.97, 1)])
def test_extreme_inputs_are_bounded(entry: Make, sampling: str, z: float, rate: float, steps: int) -> None:
    assert 0 <= accountants.epsilon_of([entry(sampling, rate, z, steps)], DELTA, "rdp") < math.inf


def test_orders_without_a_value_are_skipped_without_a_log_message(caplog: pytest.LogCaptureFixture) -> None:
    divergences = rdp.of_step(Step(Amplification.POISSON, 0.4998, 1.0))
    assert np.isinf(divergences).any() and np.isfinite(divergences).any()
    assert not caplog.records


@pytest.mark.parametrize("sampling", ["poisson", "truncated-poisson", "fixed-size", "shuffled"])
def test_a_live_figure_is_cheap(entry: Make, sampling: str) -> None:
    """The calls of a run: charge a step, read the history, account for all of it."""
    period = 4 if sampling == "shuffled" else 1
    event = entry(sampling, 0.25, 1.0, 1, period=period).event
    ledger = MemoryLedger()
    times = []
    for _ in range(200):
        start = time.process_time()
        ledger.charge(event)
        accountants.epsilon_of(ledger.history(), DELTA, "rdp")
        times.append(time.process_time() - start)
    assert sorted(times)[len(times) // 4] < 1e-3  # processor time, so that other processes do not count


def test_many_different_steps_share_divergences(entry: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    history = [entry("poisson", 0.01, 1 + 0.01 * i, 100) for i in range(12)]
    exact = accountants.epsilon_of(history, DELTA, "rdp")
    monkeypatch.setattr(rdp, "MOST_KINDS", 4)
    seen = set()
    real = rdp.of_step
    monkeypatch.setattr(rdp, "of_step", lambda step: (seen.add(step), real(step))[1])
    assert exact <= accountants.epsilon_of(history, DELTA, "rdp") <= 1.04 * exact
    assert len(seen) <= 5


def test_an_amplification_without_a_bound_is_refused() -> None:
    with pytest.raises(UnsupportedEventError, match="RDP"):
        rdp.of_step(Step("hope", 0.1, 1.0))  # type: ignore[arg-type]
