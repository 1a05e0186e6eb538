from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest

from clipwise.accounting import gaussian, rdp
from clipwise.accounting.composition import Amplification, Step
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Adjacency, Entry

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
    assert rdp.epsilon([entry("poisson", rate, z, steps)], DELTA) == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_noise_is_relative_to_the_sensitivity_of_the_adjacency(entry: Make, adjacency: Adjacency) -> None:
    exact = gaussian.epsilon(DELTA, 1 / 2.0)
    assert exact <= rdp.epsilon([entry("full", 1.0, 2.0, 1, adjacency=adjacency)], DELTA) <= 1.15 * exact
    if adjacency is Adjacency.REPLACE_ONE:
        assert exact <= rdp.epsilon([entry("fixed-size", 1.0, 2.0, 1)], DELTA) <= 1.15 * exact


def test_fixed_size_divergence_of_order_two_pins_the_unit() -> None:
    """Wang, Balle, Kasiviswanathan: D_2 <= log(1 + q^2 min(4 (e^(1/z^2) - 1), 2 e^(1/z^2)))."""
    for rate, z in [(0.1, 1.0), (0.01, 0.5), (0.3, 4.0)]:
        found = rdp._divergences_of_step(Step(Amplification.DRAW, rate, z))[list(rdp._orders()).index(2)]
        by_hand = math.log1p(rate**2 * min(4 * math.expm1(z**-2), 2 * math.exp(z**-2)))
        assert found == pytest.approx(by_hand, rel=1e-9)


def test_poisson_divergence_of_order_two_pins_the_unit() -> None:
    for rate, z in [(0.1, 1.0), (0.01, 0.5)]:
        found = rdp._divergences_of_step(Step(Amplification.COIN, rate, z))[list(rdp._orders()).index(2)]
        assert found == pytest.approx(math.log1p(rate**2 * math.expm1(z**-2)), rel=1e-9)


def test_divergences_of_a_history_add_up(entry: Make) -> None:
    history = [entry("poisson", 0.01, 1.0, 300), entry("full", 1.0, 4.0, 2), entry("poisson", 0.01, 1.0, 200)]
    orders = rdp._orders()
    total = 500 * rdp._divergences_of_step(Step(Amplification.COIN, 0.01, 1.0)) + orders * 2 / (2 * 16)
    by_hand = np.min(total + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1))
    assert rdp.epsilon(history, DELTA) == pytest.approx(by_hand, rel=1e-9)


def test_shuffled_passes_are_counted(entry: Make) -> None:
    shuffled = entry("shuffled", 0.1, 2.0, 31, period=10)
    assert rdp.epsilon([shuffled], DELTA) == rdp.epsilon([entry("full", 1.0, 2.0, 4)], DELTA)


def test_delta_inverts_epsilon(entry: Make) -> None:
    history = [entry("poisson", 0.02, 1.2, 700)]
    assert rdp.delta(history, rdp.epsilon(history, DELTA)) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("amplification", list(Amplification))
@pytest.mark.parametrize(("rate", "z"), [(0.1, 1e6), (1e-3, 1e5), (1e-9, 100.0), (1e-12, 1e6)])
def test_rounding_makes_no_step_cheaper(amplification: Amplification, rate: float, z: float) -> None:
    """Steps this small have divergence alpha q^2 / (2 z^2), near or below the rounding of its terms."""
    exact = rdp._orders() / 2 * (rate / z) ** 2
    assert (rdp._divergences_of_step(Step(amplification, rate, z)) >= exact * (1 - 1e-6)).all()


def test_no_noise_and_no_history(entry: Make) -> None:
    assert rdp.epsilon([], DELTA) == 0 and rdp.delta([], 0.0) == 0
    silent = [entry("poisson", 0.1, 0.0, 1)]
    assert rdp.epsilon(silent, DELTA) == math.inf and rdp.delta(silent, 100.0) == 1


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize(("z", "rate", "steps"), [(0.01, 0.1, 10**6), (1e6, 1e-12, 10**15), (0.3, 0.97, 1)])
def test_extreme_inputs_are_bounded(entry: Make, sampling: str, z: float, rate: float, steps: int) -> None:
    assert 0 <= rdp.epsilon([entry(sampling, rate, z, steps)], DELTA) < math.inf


def test_orders_without_a_value_are_left_out_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    divergences = rdp._divergences_of_step(Step(Amplification.COIN, 0.4998, 1.0))
    assert np.isinf(divergences).any() and np.isfinite(divergences).any()
    assert not caplog.records


def test_a_live_figure_is_cheap(entry: Make) -> None:
    rdp.epsilon([entry("poisson", 0.01, 1.0, 1)], DELTA)
    times = []
    for steps in range(1, 51):
        start = time.perf_counter()
        rdp.epsilon([entry("poisson", 0.01, 1.0, steps)], DELTA)
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 4] < 1e-3


def test_an_amplification_without_a_bound_is_refused() -> None:
    with pytest.raises(UnsupportedEventError, match="RDP"):
        rdp._divergences_of_step(Step("hope", 0.1, 1.0))  # type: ignore[arg-type]
