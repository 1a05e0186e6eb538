"""A privacy statement says what was promised: neither more nor less, and nothing secret."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise import FileLedger, PerExample
from clipwise.privacy import Adjacency, Entry, Event, Part, Sampling, Spent, Unit
from clipwise.statement import NOT_COVERED, Statement
from tests.runs import private_run, train

EVENT = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.1, 0.2)


def statement(epsilon: float = 2.5, **changes: Any) -> Statement:
    event = changes.pop("event", EVENT)
    spent = Spent(epsilon, 1e-5, event.adjacency, event.unit, event.sampling, 7, "pld")
    plain: dict[str, Any] = {
        "spent": spent,
        "event": event,
        "history": (Entry(event, 7),),
        "parts": (Part("all", ("w", "b"), 1.0, 1.1),),
        "expected_batch_size": 8.0,
        "strategy": {"strategy": "per-example", "max_norm": 1.0},
        "seeded": False,
        "probed": True,
    }
    return Statement(**{**plain, **changes})


def line(statement: Statement, name: str) -> str:
    (found,) = [text for text in str(statement).splitlines() if text.strip().startswith(name)]
    return found


@given(st.floats(1e-9, 1e9))
def test_the_stated_epsilon_is_never_below_the_true_one(epsilon: float) -> None:
    shown = float(line(statement(epsilon), "guarantee").split("(")[1].split(",")[0])
    assert epsilon <= shown <= epsilon * 1.0011


@pytest.mark.parametrize(
    ("epsilon", "shown"), [(3.00004, "3.001"), (3.0, "3"), (9.99991, "10"), (math.inf, "inf"), (0, "0")]
)
def test_epsilon_is_rounded_up(epsilon: float, shown: str) -> None:
    assert f"({shown}, 1e-05)-differential privacy" in str(statement(epsilon))


def test_it_says_who_is_protected_and_how() -> None:
    text = str(statement())
    assert "one record replaced by an empty one (the number of records is public)" in text
    assert "7 steps, poisson sampling at rate 0.2" in text and "noise multiplier 1.1" in text
    assert "all: 1" in line(statement(), "sensitivity")
    assert "8, a public constant" in line(statement(), "divisor")
    event = Event(Sampling.FIXED_SIZE, Adjacency.REPLACE_ONE, Unit.USER, 1.1, 0.2)
    assert "one user replaced by another" in str(statement(event=event))
    for what in NOT_COVERED:
        assert what in text


def test_it_says_what_is_only_assumed() -> None:
    assert "probed on the first batches, not proven" in str(statement())
    assert "not probed" in str(statement(probed=False))
    assert "seed" not in str(statement())
    assert "only while that seed is secret" in line(statement(seeded=True), "seed")


def test_it_names_every_kind_of_release() -> None:
    other = Event(Sampling.SHUFFLED, Adjacency.ZERO_OUT, Unit.RECORD, 2.0, 0.25, 4)
    text = str(statement(history=(Entry(EVENT, 4), Entry(other, 3), Entry(EVENT, 2))))
    assert "6 steps, poisson" in text and "3 steps, shuffled" in text
    assert "0 steps, poisson" in str(statement(history=()))


def test_many_parts_are_counted() -> None:
    parts = tuple(Part(f"layer {k}", (f"w{k}",), 1.0, 1.0) for k in range(9))
    assert line(statement(parts=parts), "sensitivity").endswith("and 5 more parts")


def test_it_is_plain_data_too() -> None:
    plain = json.loads(json.dumps(statement().to_dict()))
    assert plain["spent"]["epsilon"] == 2.5 and plain["spent"]["adjacency"] == "zero-out"
    assert Event.from_dict(plain["event"]) == EVENT
    assert plain["history"] == [{"event": EVENT.to_dict(), "count": 7}]
    assert plain["parts"] == [{"name": "all", "parameters": ["w", "b"], "sensitivity": 1.0, "noise_std": 1.1}]
    assert set(plain["versions"]) == {"python", "clipwise", "torch", "numpy", "dp-accounting"}
    assert plain["seeded"] is False and plain["independence_probed"] is True


def test_the_statement_of_a_run(tmp_path: Any) -> None:
    model, private = private_run(
        ledger=tmp_path / "run.ledger", clipping=PerExample(0.5, parts="layer"), seed=1
    )
    train(model, private, 3)
    said = private.statement()
    assert said.spent == private.spent() and said.history == tuple(private._ledger.history())
    assert said.seeded and said.probed and list(said.parts) == private.parts()
    assert said.expected_batch_size == 8 and said.strategy["max_norm"] == 0.5
    private.close()
    joined = FileLedger(tmp_path / "run.ledger", join=True)
    model, private = private_run(ledger=joined, sampling="shuffled", probe_independence=False)
    train(model, private, 2)
    text = str(private.statement())
    assert "3 steps, poisson" in text and "2 steps, shuffled" in text and "not probed" in text
