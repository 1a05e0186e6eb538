"""The accounting of every accepted combination bounds the exact output distributions on tiny data sets.

The combinations are the rows of the table in docs/concepts/combinations.md. Scheme, cut, noise and event are those of a
run. The law of the draws, the clipped sums and delta are computed a second time, in mixtures.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from clipwise import Batch, ConfigurationError, Private, accounting
from clipwise.accounting import gaussian
from clipwise.privacy import Adjacency, Entry, Event, Part
from clipwise.sampling.base import Scheme
from clipwise.sampling.microbatches import microbatches_of
from clipwise.sampling.schemes import FixedSize, Partition, Poisson, Shuffled, TruncatedPoisson
from tests.soundness import mixtures
from tests.soundness.combinations import Combination, Size, bound_of, documented, losses, small
from tests.soundness.mixtures import Array, Law, assignments, delta, densities, law

TABLE = documented()
Z = 0.8
EPSILONS = (0.0, 0.25, 0.5, 1.0, 2.0)
SLACK = 1 + 1e-3  # of sums over a grid for integrals


# The schemes draw by their stated distributions


@pytest.mark.parametrize(
    "scheme",
    [
        Poisson(3, 0.4),
        TruncatedPoisson(3, 0.4, 2),
        FixedSize(4, 2),
        FixedSize(5, 2, microbatches=2),
        Partition(5, 2),
        Partition(6, 4, microbatches=2),
        Shuffled(4, 2),
    ],
    ids=repr,
)
def test_schemes_draw_by_their_law(scheme: Scheme) -> None:
    expected, found = law(scheme), mixtures.frequencies(scheme, 4000)
    assert math.isclose(sum(expected.values()), 1.0) and found.keys() <= expected.keys()
    for batch, p in expected.items():
        assert abs(found.get(batch, 0.0) - p) < 5 * math.sqrt(p * (1 - p) / 4000)


# The bound is above the exact delta of the worst neighbours


@dataclass(frozen=True)
class Case:
    """A combination on a few units, with the possible values of a unit's vector, in units of C."""

    combination: Combination
    size: Size
    choices: tuple[float, ...]
    is_tight: bool  # whether some pair reaches the bound

    def __str__(self) -> str:
        return f"{' '.join(self.combination)} {self.size.units} {dict(self.size.options or {})}"


SUMS = (-1.0, 0.0, 1.0)
MEANS = (-9.0, -1.0, 0.0, 1.0, 9.0)  # the largest reverse the mean of a few


def cases() -> Iterator[Case]:
    for one in TABLE:
        in_microbatches = one.clipping == "Batch" and one.unit == "record"
        units, counts = (4, (1, 2)) if in_microbatches else (3, (2,))  # (a user has two records)
        choices = MEANS if in_microbatches else SUMS
        by_sampling: dict[str, list[tuple[int, dict[str, float]]]] = {
            "poisson": [(units, {"sample_rate": 0.4})],
            "truncated-poisson": [(units, {"sample_rate": 0.4, "max_batch_size": units - 1})],
            "fixed-size": [(4, {"batch_size": 2})],
            "partition": [(4, {"batch_size": 2}), (5, {"batch_size": 2})],  # the second has a short block
            "shuffled": [(4, {"batch_size": 2})],
            "full": [(3, {})],
        }
        # Under Poisson sampling the unit may be alone in its microbatch, and then moves it from 0 only; a shuffled
        # batch partly reveals the unit's position.
        is_tight = one.sampling in ("fixed-size", "partition", "full") or (
            one.sampling == "poisson" and not in_microbatches
        )
        for (size, options), k in itertools.product(by_sampling[one.sampling], counts):
            if one.clipping == "Batch(microbatches=N)" and one.sampling in ("fixed-size", "partition"):
                options = {"batch_size": size}
            if k == 1 or not in_microbatches or size % k == 0 or one.sampling == "full":
                yield Case(one, Size(size, options, microbatches=k), choices, is_tight)
        if one.sampling == "partition" and in_microbatches:
            yield Case(one, Size(6, {"batch_size": 4}, microbatches=2), (-9.0, 1.0, 9.0), is_tight)


@dataclass(frozen=True)
class Exact:
    """The output distributions that a case can have: sums in units of the noise."""

    event: Event
    probabilities: Law
    means_LD: Array
    pairs: list[tuple[int, int]]

    def densities(self, step: float) -> Array:
        weights_D = np.array(list(self.probabilities.values()))
        return densities(self.means_LD, weights_D, 1.0, step)


def exact(private: Private, case: Case, victims: list[int] | None = None) -> Exact:
    """Return them from the run's scheme, cut, sensitivity and noise."""
    is_replaced = private._context.event.adjacency is Adjacency.REPLACE_ONE
    probabilities = law(private._context.scheme)
    total = total_of(private, case.combination)
    values = assignments(case.choices, case.size.units)
    means_LD, pairs = mixtures.neighbours(
        values, probabilities, total, is_replaced, victims or list(range(case.size.units))
    )
    return Exact(private._context.event, probabilities, means_LD / noise_of(private, case.combination), pairs)


def total_of(private: Private, combination: Combination) -> mixtures.Sum:
    if combination.clipping == "Batch" and combination.unit == "record":
        assert isinstance(private._context.strategy, Batch)
        return mixtures.sum_of_microbatches(
            microbatches_of(private._context.scheme, private._context.strategy.microbatches)
        )
    return mixtures.sum_of_units


def noise_of(private: Private, combination: Combination) -> float:
    """s over C, for the bound C of one clipped vector."""
    (part,) = private.parts()
    return part.noise_std / bound_of(combination)


@cache
def stated(event: Event, count: int) -> tuple[float, ...]:
    return tuple(accounting.delta_of([Entry(event, count)], epsilon) for epsilon in EPSILONS)


def worst(found: Exact, step: float = 0.02) -> list[float]:
    """The largest exact delta of any pair, for each epsilon."""
    P_LG = found.densities(step)
    return [max(delta(P_LG[a], P_LG[b], epsilon) for a, b in found.pairs) for epsilon in EPSILONS]


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_one_step_costs_no_more_than_is_stated(case: Case) -> None:
    found = exact(small(case.combination, case.size, z=Z), case)
    assert found.pairs
    for true, bound in zip(worst(found), stated(found.event, 1), strict=True):
        assert true <= bound * SLACK
        assert true >= 0.97 * bound or not case.is_tight


def test_every_row_has_a_case() -> None:
    assert {case.combination for case in cases()} == set(TABLE)


@pytest.mark.parametrize("case", [c for c in cases() if c.combination.sampling != "shuffled"], ids=str)
def test_two_steps_cost_no_more_than_is_stated(case: Case) -> None:
    """The second step may have any other gradients of the same neighbours: the costliest pairs."""
    found = exact(small(case.combination, case.size, z=Z), case, victims=[0])
    P_LG = found.densities(0.1)
    for epsilon, bound in zip(EPSILONS[1:], stated(found.event, 2)[1:], strict=True):
        # Half of epsilon in each step. Both orders of a pair are included.
        chosen = sorted(found.pairs, key=lambda ab: -delta(P_LG[ab[0]], P_LG[ab[1]], epsilon / 2))[:4]
        for (a, b), (c, d) in itertools.product(chosen, repeat=2):
            assert delta(np.outer(P_LG[a], P_LG[c]), np.outer(P_LG[b], P_LG[d]), epsilon) <= bound * 1.01


SHUFFLED = [c for c in cases() if c.combination.sampling == "shuffled"]


@pytest.mark.parametrize("case", SHUFFLED, ids=str)
def test_a_shuffled_epoch_costs_one_gaussian(case: Case) -> None:
    """Both steps of an epoch together: a record that is not in the first batch is in the second."""
    private = small(case.combination, case.size, z=Z)
    is_replaced = case.combination.adjacency == "replace-one"
    total, s = total_of(private, case.combination), noise_of(private, case.combination)
    all_units = set(range(case.size.units))
    epochs = [(first, tuple(sorted(all_units - set(first)))) for first in law(private._context.scheme)]
    long = case.choices[-1]
    highest = 0.0
    for a, b, sign in itertools.product((-1.0, 0.0, 1.0), (-1.0, 0.0, 1.0), (1.0, -1.0)):
        means = []
        for is_there in (True, False):
            steps = []
            for step, rest in enumerate((a, b)):
                x = long if step == 0 else sign * long
                values = np.array([[x if is_there else -x, *([rest] * (case.size.units - 1))]])
                gone = set() if is_there or is_replaced else {0}
                steps.append([total(values, tuple(u for u in e[step] if u not in gone))[0] for e in epochs])
            means.append(np.array(steps) / s)  # [step, epoch]
        reach = max(np.abs(m).max() for m in means) + mixtures.FARTHEST
        x_G = np.arange(-reach, reach, 0.1)
        P, Q = (
            sum(np.outer(*(stats.norm.pdf(x_G - m) for m in one)) for one in two.T) * 0.01 / len(epochs)
            for two in means
        )
        for epsilon, bound in zip(EPSILONS, stated(private._context.event, 2), strict=True):
            for true in (delta(P, Q, epsilon), delta(Q, P, epsilon)):
                highest = max(highest, true / bound)
    assert 0.3 < highest <= 1.001
    assert stated(private._context.event, 1) == stated(private._context.event, 2) < stated(private._context.event, 3)


def test_a_record_in_a_microbatch_needs_twice_its_bound() -> None:
    """Half of the noise, as for S = C, would be too little under zero-out as well."""
    for sampling in ("poisson", "full"):
        one = Combination(sampling, "zero-out", "record", "Batch")
        options = {"sample_rate": 0.7} if sampling == "poisson" else {}
        case = Case(one, Size(4, options, microbatches=1), MEANS, is_tight=False)
        found = exact(small(one, case.size, z=Z / 2), case)
        claimed = [accounting.delta_of([Entry(Event(**{**vars(found.event), "noise_multiplier": Z}), 1)], 1.0)]
        assert worst(found)[EPSILONS.index(1.0)] > 1.2 * claimed[0]


def test_the_sums_here_are_those_of_the_library() -> None:
    random = np.random.default_rng(0)
    for one in TABLE:
        if one.clipping in ("Lipschitz", "Backprop"):
            continue
        size = Size(4, {} if one.sampling == "full" else {"batch_size": 4 if "N" in one.clipping else 2}, 2)
        private = small(one, size)
        total = total_of(private, one)
        for drawn in list(law(private._context.scheme))[-3:]:
            values = random.choice(MEANS, 4)
            rows = torch.tensor(values[np.arange(8) % 4] if one.unit == "user" else values)[:, None].float()
            pieces = private.loader._cut(np.array(drawn, dtype=np.int64))
            sums = [
                private._context.clipper.clipped_sum(losses(private._context.model, rows[piece])) for piece in pieces
            ]
            got = sum(float(found["weight"]) for found in sums)
            assert got == pytest.approx(total(values[None], drawn)[0], abs=1e-4)


# Several parts of one release


def joint_densities(vectors: list[tuple[float, Array]], x_G: Array) -> Array:
    """Of a mixture of Gaussians in the plane with noise 1, times the area of a cell."""
    cell = (x_G[1] - x_G[0]) ** 2
    return sum(p * np.outer(*(stats.norm.pdf(x_G - m) for m in mean)) for p, mean in vectors) * cell


def spread(parts: list[Part], sign: float, alone: bool) -> list[tuple[float, Array]]:
    """A unit's contribution in units of the noise: all parts at once, or one of them at random."""
    vector = np.array([sign * part.sensitivity / part.noise_std for part in parts])
    return [(1 / len(parts), vector * row) for row in np.eye(len(parts))] if alone else [(1.0, vector)]


# Of two units, or two blocks, one is drawn, or each is by chance.
HALF_OF_TWO = {
    Combination("poisson", "zero-out", "record", "PerExample"): Size(2, {"sample_rate": 0.5}),
    Combination("fixed-size", "replace-one", "record", "PerExample"): Size(2, {"batch_size": 1}),
    Combination("partition", "replace-one", "record", "Batch"): Size(4, {"batch_size": 2}, microbatches=1),
}
BESIDE = ["max_norm=Quantile(...)", "running_statistics=NoisedStatistics(...)"]


@pytest.mark.parametrize("option", [*BESIDE, "parts='tensor'", "parts=RandomLayer(...)"])
@pytest.mark.parametrize("combination", HALF_OF_TWO, ids=" ".join)
def test_the_parts_of_a_step_are_one_release(combination: Combination, option: str) -> None:
    """The parts share the draw, and each has its own noise."""
    if combination.clipping == "Batch" and "Quantile" in option:
        return  # which Batch refuses
    sampling = combination.sampling
    private = small(combination, HALF_OF_TWO[combination], option, z=0.9)
    parts = private.parts()
    assert (len(parts) == 2) is (option in BESIDE)
    if len(parts) == 1:  # the model has one tensor: use its part twice
        shared = 1.0 if parts[0].alone else math.sqrt(2)
        parts = [Part(n, (), parts[0].sensitivity, shared * parts[0].noise_std) for n in "ab"]
    alone = option.startswith("parts=Random")
    x_G = np.arange(-9, 9, 0.06)
    if sampling == "poisson":
        one = [(0.5 * p, m) for p, m in spread(parts, 1.0, alone)] + [(0.5, np.zeros(2))]
        other = [(1.0, np.zeros(2))]
    else:  # from -C to C in every part; the other unit is at -C
        half = [Part(p.name, (), p.sensitivity / 2, p.noise_std) for p in parts]
        one = [(0.5 * p, m) for sign in (1.0, -1.0) for p, m in spread(half, sign, alone)]
        other = spread(half, -1.0, alone)
    P, Q = (joint_densities(vectors, x_G) for vectors in (one, other))
    for epsilon, bound in zip(EPSILONS, stated(private._context.event, 1), strict=True):
        for true in (delta(P, Q, epsilon), delta(Q, P, epsilon)):
            assert true <= bound * SLACK
        if not alone:  # no amplification is claimed for the random layer
            assert max(delta(P, Q, epsilon), delta(Q, P, epsilon)) >= 0.97 * bound


# Refused combinations: the tests above would fail for them

PLANTED = [
    *(Combination("partition", "replace-one", "record", name) for name in ("PerExample", "Lipschitz", "Backprop")),
    Combination("partition", "replace-one", "user", "Batch"),
]


@pytest.mark.parametrize("combination", PLANTED, ids=" ".join)
def test_a_partition_with_per_unit_clipping_is_refused(
    combination: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "group=" if combination.unit == "user" else combination.clipping
    with pytest.raises(ConfigurationError, match=rf"sampling='partition'.*{name}.*'fixed-size' or 'shuffled'"):
        small(combination)
    monkeypatch.setattr("clipwise.engine.make_private.require_whole_blocks", lambda *_: None)
    case = Case(combination, Size(8, {"batch_size": 4}), (-1.0, 1.0), is_tight=False)
    found = exact(small(combination, case.size, z=0.4), case, victims=[0])
    true, claimed = worst(found, 0.05), stated(found.event, 1)
    assert true[-1] > 1.2 * claimed[-1]
    p, z = found.event.sample_rate, found.event.noise_multiplier
    for epsilon, one in zip(EPSILONS, true, strict=True):  # of a block that can be recognised
        assert one <= p * gaussian.delta(epsilon, 1 / z) * SLACK


def test_the_cost_of_a_recognisable_block() -> None:
    """The example of docs/concepts/combinations.md: 60.4, where the subsampling operator has 3.06."""
    p, T, z = 1 / 235, 14100, 1.1
    k = np.arange(0, 200)
    weights = stats.binom.pmf(k, T, p)

    def true(epsilon: float) -> float:
        each = [gaussian.delta(epsilon, math.sqrt(n) / z) if n else 0.0 for n in k.tolist()]
        return float(weights @ np.array(each))

    assert true(60.3) > 1e-5 > true(60.5)
    claimed = accounting.epsilon(noise_multiplier=z, sample_rate=p, steps=T, delta=1e-5, sampling="partition")
    assert claimed == pytest.approx(3.06, abs=0.01)


def test_the_index_of_a_unit_sets_its_microbatch() -> None:
    """The tests above use clipped values by index, so every cut must depend on the index alone."""
    for one in TABLE:
        private = small(one)
        if one.unit == "user" or not isinstance(private._context.strategy, Batch):
            continue
        homes: dict[int, set[int]] = {}
        for drawn in law(private._context.scheme):
            for number, piece in enumerate(private.loader._cut(np.array(drawn, dtype=np.int64))):
                for record in piece:
                    blocks = isinstance(private._context.scheme, Partition)
                    homes.setdefault(int(record), set()).add(int(piece[0]) if blocks else number)
        assert all(len(home) == 1 for home in homes.values())
