from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft, special

from clipwise.accounting import accountants, gaussian, pld
from clipwise.accounting.composition import Step, compose
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Adjacency, Entry

Make = Callable[..., Entry]
DELTA = 1e-5

# z, rate, steps, epsilon of Poisson sampling and of fixed-size batches (C_p; computed on a coarser grid than
# ours, so up to 1.1 percent above).
TABLE = [
    (1.1, 256 / 60000, 14062, 2.382, 3.073),
    (0.925, 1024 / 60000, 586, 2.992, 3.508),
    (1.759, 1024 / 60000, 586, 0.998, 1.154),
    (2.447, 1024 / 60000, 352, 0.499, 0.557),
    (0.7, 1024 / 60000, 59, 3.000, 3.097),
    (4.0, 0.01, 10000, 0.947, 1.050),
    (1.0, 0.01, 1000, 1.828, 2.199),
]


@pytest.mark.parametrize(("z", "rate", "steps", "poisson", "fixed"), TABLE)
def test_known_values(entry: Make, z: float, rate: float, steps: int, poisson: float, fixed: float) -> None:
    assert accountants.epsilon_of([entry("poisson", rate, z, steps)], DELTA) == pytest.approx(poisson, rel=2e-3)
    found = accountants.epsilon_of([entry("fixed-size", rate, z, steps)], DELTA)
    assert 0.989 * fixed <= found <= 1.001 * fixed
    assert accountants.epsilon_of([entry("partition", rate, z, steps)], DELTA) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("z", "rate", "steps", "interval"),
    [(1.1, 256 / 60000, 5000, 1e-4), (0.6, 0.02, 100, 5e-4), (3.0, 0.3, 50, 5e-4), (0.8, 0.9, 3, 1e-3)],
)
def test_poisson_lies_between_an_optimistic_and_a_pessimistic_reference(
    entry: Make, z: float, rate: float, steps: int, interval: float
) -> None:
    """dp-accounting's own distributions, by another discretisation from below, by the same from above."""
    history = [entry("poisson", rate, z, steps)]
    grid = {"sampling_prob": rate, "value_discretization_interval": interval}
    below = reference.from_gaussian_mechanism(z, pessimistic_estimate=False, use_connect_dots=False, **grid)
    below, above = (p.self_compose(steps) for p in (below, reference.from_gaussian_mechanism(z, **grid)))
    assert below.get_epsilon_for_delta(DELTA) <= accountants.epsilon_of(history, DELTA)
    assert accountants.epsilon_of(history, DELTA) == pytest.approx(above.get_epsilon_for_delta(DELTA), rel=1e-3)
    for epsilon in (0.0, 0.1, 1.0):
        assert below.get_delta_for_epsilon(epsilon) <= accountants.delta_of(history, epsilon)
        assert accountants.delta_of(history, epsilon) == pytest.approx(above.get_delta_for_epsilon(epsilon), rel=2e-3)


def test_each_direction_of_poisson_agrees_with_the_reference(entry: Make) -> None:
    """A maximum over directions hides an error in the smaller one."""
    rate, z, steps, interval = 0.05, 0.9, 40, 2.0**-12
    ours = pld._directions(compose([entry("poisson", rate, z, steps)]), interval, 2)
    theirs = reference.from_gaussian_mechanism(
        z, sampling_prob=rate, value_discretization_interval=interval
    ).self_compose(steps)
    for losses, pmf in zip(ours, (theirs._pmf_remove, theirs._pmf_add), strict=True):
        for epsilon in (0.0, 0.5, 1.0, 2.0):
            assert losses.delta(epsilon) == pytest.approx(pmf.get_delta_for_epsilon(epsilon), rel=1e-6, abs=2e-13)


def bucketed_draw(rate: float, z: float, steps: int, interval: float, upwards: bool) -> float:
    """Epsilon of C_p composed, with losses rounded to the grid one way: a bound from above or from below."""
    cells = math.ceil(gaussian.loss_at(gaussian.TAIL, rate, z) / interval)
    t = z * z * np.log((np.expm1(interval * np.arange(cells + 1)) + rate) / rate) + 0.5
    under_q = special.ndtr(-t / z)
    under_p = (1 - rate) * under_q + rate * special.ndtr(-(t - 1) / z)
    positive, negative = -np.diff(under_p), -np.diff(under_q)  # P(l in cell), P(l in mirrored cell)
    size = fft.next_fast_len(max(2 * cells, int(16 / interval)))
    masses = np.zeros(size)
    index = np.arange(cells)
    np.add.at(masses, index + upwards, positive)
    np.add.at(masses, -(index + 1 - upwards) % size, negative)
    masses[0] += 1 - positive.sum() - negative.sum()
    total = np.roll(np.real(fft.ifft(fft.fft(masses) ** steps)), size // 2)
    losses = interval * (np.arange(size) - size // 2)
    low, high = 0.0, 8.0
    for _ in range(50):
        middle = (low + high) / 2
        above = losses > middle
        if total[above] @ -np.expm1(middle - losses[above]) > DELTA:
            low = middle
        else:
            high = middle
    return high


@pytest.mark.parametrize(("z", "rate", "steps", "width"), [(1.0, 0.01, 1000, 0.02), (0.7, 0.05, 20, 1e-3)])
def test_fixed_size_lies_between_roundings(entry: Make, z: float, rate: float, steps: int, width: float) -> None:
    below, above = (bucketed_draw(rate, z, steps, 2e-5, upwards) for upwards in (False, True))
    assert above - below < width
    found = accountants.epsilon_of([entry("fixed-size", rate, z, steps)], DELTA)
    assert below <= found <= above
    assert found == pytest.approx((above + below) / 2, rel=1e-3)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize(("z", "rate"), [(0.5, 0.01), (1.0, 0.3), (5.0, 0.9)])
def test_one_step_is_the_closed_form(entry: Make, sampling: str, z: float, rate: float) -> None:
    for epsilon in (0.0, 0.05, 0.3):
        exact = gaussian.hockey_stick(np.array([epsilon]), rate, z)[0]
        found = accountants.delta_of([entry(sampling, rate, z, 1)], epsilon)
        assert exact <= found <= exact * 1.002 + 1e-12


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_a_rate_towards_one_becomes_the_gaussian(entry: Make, sampling: str) -> None:
    exact = gaussian.epsilon(DELTA, math.sqrt(10) / 1.5)
    assert accountants.epsilon_of([entry(sampling, 1.0, 1.5, 10)], DELTA) == pytest.approx(exact, rel=1e-9)
    assert accountants.epsilon_of([entry(sampling, 1 - 1e-9, 1.5, 10)], DELTA) == pytest.approx(exact, rel=1e-3)


def test_unamplified_histories_are_exact(entry: Make) -> None:
    history = [entry("full", 1.0, 3.0, 9), entry("shuffled", 0.05, 2.0, 41, period=20)]
    mu = math.sqrt(9 / 9 + 3 / 4)
    assert accountants.epsilon_of(history, DELTA) == pytest.approx(gaussian.epsilon(DELTA, mu), rel=1e-9)
    assert accountants.delta_of(history, 1.0) == pytest.approx(gaussian.delta(1.0, mu), rel=1e-9)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_noise_is_relative_to_the_sensitivity_of_the_adjacency(entry: Make, adjacency: Adjacency) -> None:
    """Equal z is equal privacy without sampling; dp-accounting's PLD would take z / 2 under replace-one."""
    z = 2.0
    exact = gaussian.epsilon(DELTA, 1 / z)
    assert accountants.epsilon_of([entry("full", 1.0, z, 1, adjacency=adjacency)], DELTA) == pytest.approx(exact)
    if adjacency is Adjacency.REPLACE_ONE:
        assert accountants.epsilon_of([entry("fixed-size", 1 - 1e-9, z, 1)], DELTA) == pytest.approx(exact, rel=1e-3)
        doubled = reference.from_gaussian_mechanism(2 * z, neighboring_relation=reference.NeighborRel.REPLACE_ONE)
        assert doubled.get_epsilon_for_delta(DELTA) == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
def test_mixed_histories_compose(entry: Make) -> None:
    history = [entry("poisson", 0.02, 0.9, 200), entry("full", 1.0, 2.0, 1), entry("poisson", 0.1, 3.0, 50)]
    by_reference = (
        reference.from_gaussian_mechanism(0.9, sampling_prob=0.02)
        .self_compose(200)
        .compose(reference.from_gaussian_mechanism(2.0))
        .compose(reference.from_gaussian_mechanism(3.0, sampling_prob=0.1).self_compose(50))
    )
    expected = by_reference.get_epsilon_for_delta(DELTA)
    assert accountants.epsilon_of(history, DELTA) == pytest.approx(expected, rel=1e-3)
    assert accountants.epsilon_of(history[::-1], DELTA) == accountants.epsilon_of(history, DELTA)


def test_mixed_replace_one_histories_compose(entry: Make) -> None:
    """An almost certain draw is a Gaussian, so mixing it in must equal the Gaussian mixed in."""
    draws = entry("fixed-size", 0.05, 1.0, 100)
    full = entry("full", 1.0, 2.0, 3, adjacency=Adjacency.REPLACE_ONE)
    almost = entry("partition", 1 - 1e-9, 2.0, 3)
    assert accountants.epsilon_of([draws, full], DELTA) == pytest.approx(
        accountants.epsilon_of([draws, almost], DELTA), rel=1e-3
    )
    assert accountants.epsilon_of([draws, full], DELTA) > max(
        accountants.epsilon_of([draws], DELTA), accountants.epsilon_of([full], DELTA)
    )


def test_entries_of_one_event_add_up(entry: Make) -> None:
    split = [entry("poisson", 0.01, 1.0, 300), entry("poisson", 0.01, 1.0, 700)]
    assert accountants.epsilon_of(split, DELTA) == accountants.epsilon_of([entry("poisson", 0.01, 1.0, 1000)], DELTA)


schemes = st.sampled_from(["poisson", "fixed-size"])
rates = st.floats(-4, -0.1).map(lambda x: 10**x)
noises = st.floats(0.4, 8)
counts = st.integers(1, 3000)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(schemes, rates, noises, counts)
def test_monotone_and_below_rdp(entry: Make, sampling: str, rate: float, z: float, steps: int) -> None:
    history = [entry(sampling, rate, z, steps)]
    epsilon = accountants.epsilon_of(history, DELTA)
    slack = 1 + 5e-4
    assert epsilon <= accountants.epsilon_of([entry(sampling, rate, z, 2 * steps)], DELTA) * slack
    assert epsilon <= accountants.epsilon_of([entry(sampling, min(1.0, 1.3 * rate), z, steps)], DELTA) * slack
    assert epsilon <= accountants.epsilon_of([entry(sampling, rate, z / 1.2, steps)], DELTA) * slack
    assert epsilon <= gaussian.epsilon(DELTA, math.sqrt(steps) / z)
    assert epsilon <= accountants.epsilon_of(history, DELTA, "rdp") * slack
    assert accountants.delta_of(history, epsilon) <= DELTA * slack


def test_replace_one_costs_more_than_zero_out(entry: Make) -> None:
    fixed, poisson = (accountants.epsilon_of([entry(s, 0.01, 1.0, 500)], DELTA) for s in ("fixed-size", "poisson"))
    assert fixed > 1.05 * poisson


EXTREME = [
    (1.0, 1e-9, 10**9),
    (1.0, 1e-300, 10**12),
    (0.02, 0.1, 100),
    (1e-3, 0.5, 10),
    (1e-300, 0.5, 10),
    (1e7, 0.01, 10**4),
    (1.0, 1 - 1e-16, 3),
    (0.5, 1e-6, 10**5),
    (0.07, 3e-9, 80),
    (20.0, 1e-3, 10**7),
    (0.05, 0.9, 10**9),
    (2.0, 0.01, 10**16),
]


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize(("z", "rate", "steps"), EXTREME)
def test_extreme_inputs_are_bounded(entry: Make, sampling: str, z: float, rate: float, steps: int) -> None:
    history = [entry(sampling, rate, z, steps)]
    epsilon = accountants.epsilon_of(history, DELTA)
    assert epsilon >= 0
    # One step bounds many from below; giving up amplification bounds them from above.
    one_step = accountants.epsilon_of([entry(sampling, rate, z, 1)], DELTA)
    assert epsilon >= one_step * (1 - 1e-9)
    assert epsilon <= gaussian.epsilon(DELTA, math.sqrt(steps) / z) * (1 + 1e-9)
    if math.isfinite(epsilon):
        by_rdp = steps > pld.MOST_STEPS  # which has a small rounding error at such numbers
        assert 0 <= accountants.delta_of(history, epsilon) <= DELTA * (1.5 if by_rdp else 1.01)


@pytest.mark.parametrize("delta", [1e-30, 1e-14, 1e-12, 0.5, 0.999])
def test_any_delta_has_a_bound(entry: Make, delta: float) -> None:
    history = [entry("poisson", 0.01, 1.0, 100)]
    epsilon = accountants.epsilon_of(history, delta)
    assert math.isfinite(epsilon)
    assert accountants.epsilon_of(history, delta / 2) >= epsilon >= 0
    # The closed form of one step is a lower bound, even if only RDP is left.
    assert gaussian.hockey_stick(np.array([epsilon]), 0.01, 1.0)[0] <= delta


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_a_profile_is_the_deltas_at_many_epsilons(entry: Make, sampling: str) -> None:
    total = compose([entry(sampling, 0.01, 1.0, 500), entry(sampling, 0.02, 2.0, 100)])
    epsilons = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 3.0])
    found = pld.profile(total, epsilons)
    one_by_one = np.array([pld.delta(total, float(e)) for e in epsilons])
    assert found == pytest.approx(one_by_one, rel=1e-3)
    assert np.all(np.diff(found) <= 0)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize("delta", [1e-9, 1e-15, 1e-22, 1e-30])
def test_small_deltas_of_one_step_are_tight(entry: Make, sampling: str, delta: float) -> None:
    total = compose([entry(sampling, 0.01, 1.0, 1)])
    epsilon = pld.epsilon(total, delta)
    for factor, within in ((1.0, True), (0.998, False)):
        true = float(gaussian.hockey_stick(np.array([factor * epsilon]), 0.01, 1.0)[0])
        assert (true <= delta) is within
    assert pld.delta(total, epsilon) <= delta * 1.001


def test_no_noise_and_no_history(entry: Make) -> None:
    assert accountants.epsilon_of([], DELTA) == 0 and accountants.delta_of([], 0.0) == 0
    for z in (0.0, 1e-170):
        silent = [entry("poisson", 0.1, 1.0, 5), entry("poisson", 0.1, z, 1)]
        assert accountants.epsilon_of(silent, DELTA) == math.inf and accountants.delta_of(silent, 100.0) == 1


def test_an_amplification_without_a_bound_is_refused() -> None:
    with pytest.raises(UnsupportedEventError, match="PLD"):
        pld._of_step(Step("hope", 0.1, 1.0), 0.01, 9)  # type: ignore[arg-type]
