"""The API fuzzer finds no errors in clipwise, and finds planted ones."""

from __future__ import annotations

from typing import Any

import pytest

from clipwise.accounting import epsilon
from clipwise.engine import checkpoint, step
from clipwise.errors import ConfigurationError
from tests.api_fuzz import figures, run
from tests.api_fuzz.outcome import Outcome
from tests.api_fuzz.run import GAMES, case, game_of

SEEDS = range(200)


def problems(seeds: range, game: str | None = None) -> list[str]:
    outcomes = [case(seed) for seed in seeds if game in (None, game_of(seed))]
    return [f"--only {o.seed}: {o.problem}" for o in outcomes if o.problem]


def test_random_uses_end_well() -> None:
    assert problems(SEEDS) == []


def test_every_game_is_played_and_a_case_can_be_repeated() -> None:
    assert {game_of(seed) for seed in SEEDS} == set(GAMES)
    for seed in range(20):
        first, again = case(seed), case(seed)
        assert (first.game, first.refusals) == (again.game, again.refusals)


def test_a_wrong_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Division by the realised batch size is right only if it equals the expected one."""
    honest = step.gather

    def planted(context: Any, piece: Any, clipped: Any) -> bool:
        return honest(context, piece, {name: t / max(1, piece.size) for name, t in clipped.items()})

    monkeypatch.setattr(step, "gather", planted)
    assert any("not that of a forward pass for each example" in problem for problem in problems(SEEDS, "run"))


def test_a_release_that_is_not_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "charge", lambda context, check: None)
    assert any("releases, and 0 counted" in problem for problem in problems(SEEDS, "run"))


def test_an_epsilon_that_falls_with_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(**arguments: Any) -> float:
        return epsilon(**arguments) / (1 + arguments["steps"]) ** 2

    monkeypatch.setattr(figures.accounting, "epsilon", planted)
    assert any("twice the steps" in problem for problem in problems(SEEDS, "figure"))


def test_a_crash_from_inside_and_a_poor_message_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyError("deep inside")

    def mumble(*_: object, **__: object) -> None:
        raise ConfigurationError("no")

    monkeypatch.setattr(checkpoint, "load", crash)
    assert any("KeyError" in problem for problem in problems(SEEDS, "checkpoint"))
    monkeypatch.setattr(figures.accounting, "epsilon", mumble)
    assert any("explains nothing" in problem for problem in problems(SEEDS, "figure"))


def test_the_command_fails_on_a_problem_and_names_the_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "case", lambda seed: Outcome("run", seed, "planted" if seed == 7 else ""))
    assert run.main(["--cases", "2", "--seed", "7"]) == 1
    assert "--only 7 (run): planted" in capsys.readouterr().out
    assert run.main(["--only", "8"]) == 0
