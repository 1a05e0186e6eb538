"""The privacy statement: its text, its JSON, and statements of runs and ledgers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise import FileLedger, PerExample, accounting, make_private
from clipwise.contrib import Multipliers, RandomLayer, ReleasedNorms, Sparse
from clipwise.errors import LedgerError
from clipwise.ledger.run_description import About, versions
from clipwise.privacy import Adjacency, Entry, Event, Part, Sampling, Spent, Unit
from clipwise.report.risk import Risk
from clipwise.report.statement import FORMAT, Statement, of_ledger, of_releases
from clipwise.report.wording import NOT_COVERED
from tests.runs import private_run, train

EVENT = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.1, 0.2)
RISK = Risk(((0.001, 0.0123456), (0.01, 0.05), (0.1, 0.2)), 0.31, 0.655, 0.8, ((1e-5, 2.5),))
ABOUT = About(
    strategy={"strategy": "per-example", "max_norm": 1.0},
    parts=(Part("all", ("w", "b"), 1.0, 1.1),),
    divisor=8.0,
    arithmetic="ieee",
    delta=1e-5,
    seeded=False,
    probed=True,
    versions={"python": "3.0", "clipwise": "0.0.9"},
)


def statement(epsilon: float = 2.5, about: About = ABOUT, **changes: Any) -> Statement:
    event = changes.pop("event", EVENT)
    spent = Spent(epsilon, 1e-5, event.adjacency, event.unit, event.sampling, 7, "pld")
    plain: dict[str, Any] = {
        "run": "ab12",
        "spent": spent,
        "history": (Entry(event, 7),),
        "risk": RISK,
        "processes": (about,),
        "dataset_size": 40,
    }
    return Statement(**{**plain, **changes})


def lines(statement: Statement, name: str) -> list[str]:
    """The lines under a label."""
    found, label = [], ""
    for text in str(statement).splitlines()[1:]:
        label = text[2:15].strip() or label
        if label == name:
            found.append(text[15:])
    return found


def line(statement: Statement, name: str) -> str:
    (found,) = lines(statement, name)
    return found


# In words


@given(st.floats(1e-9, 1e9))
def test_the_stated_epsilon_is_never_below_the_true_one(epsilon: float) -> None:
    shown = float(line(statement(epsilon), "guarantee").split("(")[1].split(",")[0])
    assert epsilon <= shown <= epsilon * 1.0011


@pytest.mark.parametrize(
    ("epsilon", "shown"), [(3.00004, "3.001"), (3.0, "3"), (9.99991, "10"), (math.inf, "inf"), (0, "0")]
)
def test_epsilon_is_rounded_up(epsilon: float, shown: str) -> None:
    assert f"({shown}, 1e-05)-differential privacy" in str(statement(epsilon))


def test_it_names_unit_neighbours_and_mechanism() -> None:
    said = statement()
    assert "one record is replaced by an empty one (the number of records is public)" in line(said, "neighbours")
    assert line(said, "unit") == "one record (data set: 40 records)"
    release = line(said, "releases")
    assert "7 steps, poisson sampling at rate 0.2" in release and "noise multiplier 1.1" in release
    assert line(said, "sensitivity") == "all: 1"
    assert line(said, "divisor") == "8 (a public constant)"
    assert not lines(said, "budget")
    assert "epsilon 3" in line(statement(about=replace(ABOUT, budget=3.0)), "budget")
    assert "central" in line(said, "setting") and "gradient" in line(said, "released")
    assert "not accounted" in line(said, "tuning") and "public" in line(said, "public data")
    assert len(lines(said, "not covered")) == len(NOT_COVERED) + 1  # and the low bits


@pytest.mark.parametrize(
    ("sampling", "adjacency", "words"),
    [
        (Sampling.FIXED_SIZE, Adjacency.REPLACE_ONE, "one user is replaced by another"),
        (Sampling.POISSON, Adjacency.ADD_REMOVE, "one user is added or removed (the number of users is not public)"),
    ],
)
def test_it_names_the_neighbours(sampling: Sampling, adjacency: Adjacency, words: str) -> None:
    assert words in str(statement(event=Event(sampling, adjacency, Unit.USER, 1.1, 0.2)))


@pytest.mark.parametrize("sampling", Sampling)
def test_it_states_how_batches_are_drawn(sampling: Sampling) -> None:
    adjacency = Adjacency.REPLACE_ONE if sampling in (Sampling.FIXED_SIZE, Sampling.PARTITION) else Adjacency.ZERO_OUT
    rate = 1.0 if sampling is Sampling.FULL else 0.2
    said = line(statement(event=Event(sampling, adjacency, Unit.RECORD, 1.1, rate)), "releases")
    assert f"{sampling} sampling" in said and "(" in said and "{" not in said


def test_it_states_what_an_attacker_can_do_and_rounds_up() -> None:
    said = line(statement(), "attacker")
    assert "1.235% at 0.1%, 5% at 1%, 20% at 10% false-positive rate" in said and "advantage at most 31%" in said


def test_it_lists_the_assumptions() -> None:
    assert "probed on the first batches, not proven" in str(statement())
    assert "not probed" in str(statement(about=replace(ABOUT, probed=False)))
    assert "given seed" not in str(statement()) and "dropout" in str(statement())
    seeded = statement(processes=(replace(ABOUT, seeded=True), ABOUT))  # once is enough
    assert "come from a given seed" in str(seeded) and seeded.to_dict()["seeded"] is True
    partly = statement(processes=(replace(ABOUT, probed=False), ABOUT))  # all of them, or it does not count
    assert "not probed" in str(partly) and partly.to_dict()["independence_probed"] is False
    unknown = statement(processes=(About(), ABOUT)).to_dict()
    assert unknown["seeded"] is None and unknown["independence_probed"] is None


def test_it_names_every_kind_of_release() -> None:
    other = Event(Sampling.SHUFFLED, Adjacency.ZERO_OUT, Unit.RECORD, 2.0, 0.25, 4)
    said = statement(history=(Entry(EVENT, 4), Entry(other, 3), Entry(EVENT, 2)))
    assert "6 steps, poisson" in str(said) and "3 steps, shuffled" in str(said)
    assert "was not chosen by looking at released values" in str(said)
    assert "was not chosen" not in str(statement())
    assert line(statement(history=()), "releases") == "none"


def test_many_parts_are_counted() -> None:
    parts = tuple(Part(f"layer {k}", (f"w{k}",), 1.0, 1.0) for k in range(9))
    assert line(statement(about=replace(ABOUT, parts=parts)), "sensitivity").endswith("and 5 more parts")


def test_it_states_that_a_record_moves_one_random_part_only() -> None:
    text = str(private_run(clipping=PerExample(1.0, RandomLayer()))[1].statement())
    assert "each record changes only one of these parts, drawn at random" in text
    assert "the draw must stay secret, and no amplification is claimed for it" in text
    assert "only one of these parts" not in str(private_run(clipping=PerExample(1.0, "layer"))[1].statement())


def test_it_states_that_the_scaled_sum_has_the_sensitivity() -> None:
    text = str(private_run(clipping=PerExample(1.0, Multipliers(ReleasedNorms())))[1].statement())
    assert "all: 1; of the scaled sum: gradients are multiplied by public factors" in text
    assert "scaled sum" not in str(private_run(clipping=PerExample(1.0))[1].statement())


def test_it_names_the_software_of_the_run_and_of_the_reader() -> None:
    later = replace(ABOUT, versions={"python": "3.1"})
    said = statement(processes=(ABOUT, ABOUT, later))
    assert lines(said, "software") == ["python 3.0, clipwise 0.0.9", "python 3.1"]
    assert versions()["numpy"] in line(said, "read with")


def test_what_is_not_recorded_is_marked() -> None:
    said = statement(processes=(), dataset_size=None)
    assert "not recorded" in line(said, "sensitivity") and "not recorded" in line(said, "divisor")
    assert "not recorded whether" in str(said) and line(said, "unit") == "one record"
    assert not lines(said, "software")
    assert said.to_dict()["parts"] is None and said.to_dict()["seeded"] is None


# For machines


def test_it_is_plain_data_too() -> None:
    plain = json.loads(json.dumps(statement().to_dict(), allow_nan=False))
    assert plain["format"] == FORMAT and plain["run"] == "ab12" and plain["count_is_exact"] is True
    assert plain["spent"]["epsilon"] == 2.5 and plain["spent"]["adjacency"] == "zero-out"
    assert plain["history"] == [{"event": EVENT.to_dict(), "count": 7}]
    assert Event.from_dict(plain["history"][0]["event"]) == EVENT
    (part,) = plain["parts"]
    assert part | {"scales": [], "alone": False} == part
    assert (part["name"], part["parameters"]) == ("all", ["w", "b"])
    assert (part["sensitivity"], part["noise_std"]) == (1.0, 1.1)
    assert plain["versions"] == {"run": [dict(ABOUT.versions)], "statement": versions()}
    assert plain["seeded"] is False and plain["independence_probed"] is True
    assert plain["attacker"]["power"][1] == {"false_positive_rate": 0.01, "true_positive_rate": 0.05}


def test_json_has_no_infinity() -> None:
    plain = of_releases([Entry(replace(EVENT, noise_multiplier=0.0), 3)], EVENT, 1e-5, run="", processes=()).to_dict()
    assert plain["spent"]["epsilon"] is None and plain["attacker"]["mu"] is None
    json.dumps(plain, allow_nan=False)


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "statement.md").read_text()
    for field in statement().to_dict():
        assert f"`{field}`" in text, field


# Of a run


def test_the_statement_of_a_run(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "run.ledger", clipping=PerExample(0.5, parts="layer"), seed=1)
    train(model, private, 3)
    said = private.statement()
    assert said.spent == private.spent() and said.history == tuple(private._context.ledger.history())
    assert said.about.seeded and said.about.probed and list(said.about.parts or ()) == private.parts()
    assert said.about.divisor == 8 and said.to_dict()["strategy"]["max_norm"] == 0.5
    private.close()
    joined = FileLedger(tmp_path / "run.ledger", join=True)
    model, private = private_run(ledger=joined, sampling="shuffled", probe_independence=False)
    train(model, private, 2)
    text = str(private.statement())
    assert "3 steps, poisson" in text and "2 steps, shuffled" in text and "not probed" in text
    assert "none is claimed: noise and sampling come from a given seed" in text  # of the run that joined first


def test_a_graph_that_does_not_lead_to_the_batch_is_not_called_probed(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "run.ledger")
    train(model, private, 2)
    assert private.statement().about.probed
    for x, y in private.loader:
        hidden = (x - x.mean(0)).detach()
        private.step(F.cross_entropy(model(hidden), y, reduction="none") if len(x) else None)
    assert private.statement().about.probed is False
    private.close()
    assert "not probed" in str(of_ledger(tmp_path / "run.ledger"))


def test_a_run_has_a_tradeoff_curve() -> None:
    model, private = private_run()
    assert private.tradeoff().advantage() == pytest.approx(0, abs=1e-12)
    train(model, private, 2)
    expected = accounting.tradeoff_of(private._context.ledger.history())
    assert private.tradeoff().power(0.01) == expected.power(0.01) == private.statement().risk.power[1][1] > 0.01


def test_before_the_first_step() -> None:
    _, private = private_run()
    said = private.statement()
    assert said.spent.epsilon == 0 and said.spent.steps == 0
    assert line(said, "releases") == "none" and "all: 1" in str(said)


# Of a ledger


def test_a_ledger_gives_the_statement_of_the_run(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "ledger", epsilon=5.0, delta=1e-6, epochs=2)
    train(model, private, 3)
    private.close()
    said = private.statement()
    read = of_ledger(tmp_path / "ledger")
    assert "verified when the run was closed" in str(read)
    assert str(read) == str(said) and read.to_dict() == said.to_dict()
    assert read.about.budget == 5.0 and read.spent.delta == 1e-6
    assert of_ledger(tmp_path / "ledger", delta=1e-4).spent.epsilon < read.spent.epsilon


def test_an_open_run_counts_all_possible_releases(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "ledger")
    train(model, private, 3)
    while_it_runs = of_ledger(tmp_path / "ledger")
    assert not while_it_runs.exact and while_it_runs.spent.steps >= 3
    assert "is in progress, did not end cleanly" in str(while_it_runs)
    assert while_it_runs.to_dict()["count_is_exact"] is False


def test_an_older_ledger_is_readable(tmp_path: Path) -> None:
    with FileLedger(tmp_path / "ledger", header={"dataset_size": 10**6}) as ledger:
        ledger.charge(EVENT)
    said = of_ledger(tmp_path / "ledger")
    assert said.spent.delta == pytest.approx(1e-7) and said.dataset_size == 10**6 and "not recorded" in str(said)
    with FileLedger(tmp_path / "bare") as ledger:
        ledger.charge(EVENT)
    assert of_ledger(tmp_path / "bare").spent.delta == 1e-5


def test_an_unused_ledger_is_refused(tmp_path: Path) -> None:
    FileLedger(tmp_path / "ledger").close()
    with pytest.raises(LedgerError, match="no release"):
        of_ledger(tmp_path / "ledger")


def test_other_software_does_not_hinder_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = private_run(ledger=tmp_path / "ledger")
    train(model, private, 3)
    state = private.state_dict()
    private.close()
    monkeypatch.setattr("clipwise.engine.describe.versions", lambda: {"torch": "99"})
    model.zero_grad()
    _, private = private_run(model, ledger=tmp_path / "ledger")
    private.load_state_dict(state)
    train(model, private, 1)
    private.close()
    said = of_ledger(tmp_path / "ledger")
    assert said.spent.steps == 4
    assert [found["torch"] for found in said.to_dict()["versions"]["run"]] == [versions()["torch"], "99"]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_norm": {"rule": "decay", "max_norm": 1.0, "factor": 0.9, "every": "epoch"}},
        {"parts": {"rule": "adaptive", "every": "epoch", "norms from": {"released": "gradients of the run"}}},
        {"sparse": {"every": 100}},
    ],
)
def test_bounds_that_change_are_marked(changes: dict[str, Any]) -> None:
    changing = replace(ABOUT, strategy={**(ABOUT.strategy or {}), **changes})
    assert "bounds change by a public rule" in line(statement(about=changing), "sensitivity")
    assert "bounds change" not in line(statement(), "sensitivity")


def test_public_data_is_named() -> None:
    parts = {"rule": "multipliers", "norms from": {"public": "simulated", "examples": 500}}
    about = replace(ABOUT, strategy={**(ABOUT.strategy or {}), "parts": parts})
    said = line(statement(about=about), "public data")
    assert said.startswith("simulated (500 examples), for typical gradient norms")
    assert line(statement(), "public data").startswith("none recorded")


def test_frozen_entries_are_not_spelled_out() -> None:
    model = nn.Linear(4, 2)
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        TensorDataset(torch.randn(60, 4), torch.randint(0, 2, (60,))),
        clipping=PerExample(1.0, sparse=Sparse(every=10)),
        batch_size=6,
        noise_multiplier=3.0,
    )
    while private.steps < 20:
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x), y, reduction="none"))
    assert private._context.clipper.frozen  # so there is something to leave out
    assert "entries" not in str(private.statement().to_dict()["strategy"])
