"""A strategy of one class, registered nowhere: everything else of a run works with it as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clipwise import audit, check
from clipwise.clipping import Bound, Clipper, Site, Strategy, base
from clipwise.engine import checkpoint
from clipwise.errors import ConfigurationError
from clipwise.gradients import Memory, per_example_gradients
from clipwise.privacy import Adjacency
from clipwise.report import statement
from tests.runs import data, losses_of, network, parameters, private_run, same, train


@dataclass(frozen=True)
class Squash(Strategy):
    """Every gradient g counts as C g / (C + |g|), which is shorter than C."""

    max_norm: float = 1.0
    name = "squash"

    def attach(self, site: Site) -> Clipper:
        return Squasher(self.max_norm, site)

    def describe(self) -> dict[str, Any]:
        return {"strategy": self.name, "max_norm": self.max_norm}


class Squasher(Clipper):
    def __init__(self, C: float, site: Site) -> None:
        self._C, self._parameters, self._memory = C, site.parameters, Memory()
        factor = 2 if site.adjacency is Adjacency.REPLACE_ONE else 1
        self.bounds = (Bound("all", tuple(site.parameters), factor * C),)
        self.divisor = site.scheme.expected_size

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        gradients = per_example_gradients(losses, self._parameters, self._memory)
        norm_B = torch.stack(list(gradients.squared_norms().values())).sum(0).sqrt()
        counts_B = norm_B < math.inf if real_B is None else (norm_B < math.inf) & real_B
        gradients.mute(~counts_B)
        weights_B = torch.where(counts_B, self._C / (self._C + norm_B), 0)
        return gradients.weighted_sums(dict.fromkeys(self._parameters, weights_B))


def test_it_trains_and_states_what_it_is(tmp_path: Path) -> None:
    _, private = private_run(clipping=Squash(0.5), ledger=tmp_path / "run.ledger")
    train(private._context.model, private, 3)
    private.close()
    for text in map(str, (private.statement(), statement.of_ledger(tmp_path / "run.ledger"))):
        assert "all: 0.5" in text and "on the clipped sum with noise multiplier 1" in text
    assert private.statement().to_dict()["strategy"] == {"strategy": "squash", "max_norm": 0.5}


def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clipping": Squash(), "seed": 1, "ledger": tmp_path / "run.ledger"}
    straight, twin = private_run(**{**options, "ledger": None})
    train(straight, twin, 6)
    model, private = private_run(**options)
    train(model, private, 3)
    checkpoint.save(tmp_path / "run.pt", {"model": model.state_dict(), "private": private.state_dict()})
    private.close()
    model, private = private_run(**options)
    state = checkpoint.load(tmp_path / "run.pt")
    model.load_state_dict(state["model"])
    private.load_state_dict(state["private"])
    train(model, private, 3)
    assert same(parameters(model), parameters(straight))


def test_a_compiled_step_is_the_same() -> None:
    (one, ordinary), (other, private) = (private_run(clipping=Squash(), seed=1) for _ in range(2))
    train(one, ordinary, 4)
    step = private.compiled(lambda x, y: losses_of(other, (x, y)))
    for batch, _ in zip(private.loader, range(4), strict=False):
        step(*batch)
    assert same(parameters(one), parameters(other))


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_neighbours_stay_within_the_declared_sensitivity(sampling: str) -> None:
    def run(records: Any) -> None:
        model, private = private_run(dataset=records, clipping=Squash(), sampling=sampling)
        train(model, private, 4)

    report = audit.neighbours(run, data())
    report.require()
    assert 0.1 < report.worst <= 1


def test_check_accepts_it() -> None:
    assert check(network(), lambda m, x, y: losses_of(m, (x, y)), data().tensors, clipping=Squash()).ok


def test_a_statement_without_its_code_has_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    _, private = private_run(clipping=Squash())
    train(private._context.model, private, 1)
    assert "squash" not in str(private.statement().assumptions())
    monkeypatch.delitem(base._RECORDED, "squash")
    assert "the strategy 'squash' satisfies its recorded sensitivities" in str(private.statement().assumptions())


def test_two_strategies_cannot_have_one_name() -> None:
    with pytest.raises(ConfigurationError, match="'batch' is already the name of Batch"):
        type("Copied", (Squash,), {"name": "batch"})
