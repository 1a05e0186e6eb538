"""No random loop ends in a statement that is better than the truth, and planted holes are found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clipwise.engine import private
from clipwise.validation.inventory import ModelState
from clipwise.validation.verified_weights import ReleasedGradients
from tests.user_loops import run
from tests.user_loops.run import ACTIONS, Outcome, sequence

SEEDS = range(50)  # `make loop-fuzz` tries 2,000


def outcomes(folder: Path, seeds: range = SEEDS) -> Iterator[Outcome]:
    for seed in seeds:
        (folder / str(seed)).mkdir()
        yield sequence(seed, folder / str(seed))


def broken(found: Iterable[Outcome]) -> Iterator[str]:
    return (f"--only {o.seed}: {o.problems[0]}: {' '.join(o.actions)}" for o in found if o.problems)


def test_fifty_loops_end_in_a_true_statement_or_an_error(tmp_path: Path) -> None:
    found = list(outcomes(tmp_path))
    assert list(broken(found)) == []
    assert {action for outcome in found for action in outcome.actions} == set(ACTIONS)
    assert sum(outcome.refusals == 0 for outcome in found) > 5  # and not everything is refused
    assert sum(outcome.releases for outcome in found) > 50


def test_weights_that_are_not_verified_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelState, "changed", lambda self, *_, **__: [])
    assert any("hold private data" in problem for problem in broken(outcomes(tmp_path, range(30))))


def test_contents_that_are_not_compared_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions alone miss fused optimizers and writes through `.data`."""
    honest = ModelState.changed
    monkeypatch.setattr(ModelState, "changed", lambda self, *_, **__: honest(self))
    assert any("hold private data" in problem for problem in broken(outcomes(tmp_path, range(60))))


def test_foreign_gradients_that_pass_for_released_ones_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReleasedGradients, "warning", lambda self: None)
    assert any("hold private data" in problem for problem in broken(outcomes(tmp_path, range(60))))


def test_a_release_that_is_not_counted_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = private.Private.statement

    def planted(self: Any) -> Any:
        said = honest(self)
        object.__setattr__(said.spent, "steps", said.spent.steps - 1)
        return said

    monkeypatch.setattr(private.Private, "statement", planted)
    assert any("too few releases" in problem for problem in broken(outcomes(tmp_path, range(20))))


def test_the_command_fails_on_a_problem_and_names_the_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planted(seed: int, folder: Path) -> Outcome:
        return Outcome(seed, ("save",), 0, 1, ("planted",) if seed == 8 else ())

    monkeypatch.setattr(run, "sequence", planted)
    assert run.main(["--count", "2", "--seed", "7"]) == 1
    assert "--only 8: planted: save" in capsys.readouterr().out
    assert run.main(["--only", "9"]) == 0
