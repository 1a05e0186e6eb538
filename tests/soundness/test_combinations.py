"""docs/concepts/combinations.md has every accepted combination of sampling, adjacency, unit and clipping."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest

from clipwise import Backprop, Batch, ConfigurationError, Lipschitz, PerExample
from clipwise.accounting.composition import amplified_step
from clipwise.clipping import Strategy
from clipwise.privacy import Adjacency, Amplification, Sampling, Unit
from tests.soundness.combinations import (
    OPTIONS,
    STRATEGIES,
    Combination,
    bound_of,
    documented,
    documented_options,
    small,
)

TABLE = documented()


def is_accepted(combination: Combination, option: str = "") -> bool:
    try:
        small(combination, option=option)
    except ConfigurationError:
        return False
    return True


def test_the_table_has_every_accepted_combination_and_no_other() -> None:
    everything = itertools.product(map(str, Sampling), map(str, Adjacency), ("record", "user"), STRATEGIES)
    assert {one for one in itertools.starmap(Combination, everything) if is_accepted(one)} == set(TABLE)


def test_the_table_has_every_strategy_and_unit() -> None:
    found = [*Strategy.__subclasses__()]
    for cls in found:
        found += cls.__subclasses__()
    names = {cls.__name__ for cls in found if "name" in vars(cls) and cls.__module__.startswith("clipwise.")}
    names.discard("NoiseShares")  # a Batch with users whose clients add the noise: the rows of Batch are its rows
    assert names == {name.partition("(")[0] for name in STRATEGIES}
    # No strategy has the microbatch as its unit: units are users with group=, and otherwise records.
    assert {cls.unit for cls in (PerExample, Batch, Lipschitz, Backprop)} == {Unit.RECORD}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_goes_with_all_rows_of_a_strategy_or_with_none(option: str) -> None:
    takes = documented_options()[option]
    for one in TABLE:
        assert is_accepted(one, option) is takes[one.clipping.partition("(")[0]], one
    for clipping, is_taken in takes.items():  # nothing without a row is accepted
        refused = Combination("partition", "replace-one", "user" if clipping == "Batch" else "record", clipping)
        assert not (is_taken and is_accepted(refused, option))


def test_the_table_has_every_option() -> None:
    assert documented_options().keys() == OPTIONS.keys()
    covered = {name.partition("=")[0] for name in OPTIONS} | {"microbatches"}
    # These choose the method for the same sum, the division of noise, or the constants.
    others = {"split", "method", "matmul_precision", "norm", "fixed", "temperature", "loss", "tight", "balanced"}
    others |= {"input_shape", "input_norm", "grad_norm", "max_weight_norm"}
    for strategy in (PerExample, Batch, Lipschitz, Backprop):
        assert {field.name for field in fields(strategy)} <= covered | others


@pytest.mark.parametrize("combination", TABLE, ids=" ".join)
def test_the_run_has_the_stated_sensitivity_and_event(combination: Combination) -> None:
    private = small(combination)
    (part,) = private.parts()
    row, C = TABLE[combination], bound_of(combination)
    assert part.sensitivity == pytest.approx({"C": C, "2C": 2 * C}[row.sensitivity], rel=1e-9)
    event = private._context.event
    assert [str(event.sampling), str(event.adjacency), str(event.unit)] == list(combination[:3])
    by = {"Poisson(q)": Amplification.POISSON, "C_p": Amplification.WITHOUT_REPLACEMENT}.get(row.event)
    step = amplified_step(event)
    # (All of microbatches=N records in batches of N are drawn with certainty: nothing is amplified.)
    assert (step and step.amplification) == (by if event.sample_rate < 1 else None)
    assert (event.period > 1) is (row.event == "one Gaussian per epoch" and event.sample_rate < 1)
