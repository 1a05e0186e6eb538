"""The fuzzer finds no errors in clipwise, and finds planted ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clipwise.errors import CoupledExamplesError
from clipwise.gradients import stream
from clipwise.gradients.examples import Contribution
from tests.fuzz import check as checking
from tests.fuzz import run
from tests.fuzz.blocks import KINDS, Block
from tests.fuzz.check import check
from tests.fuzz.models import all_traits, compose

SEEDS = range(40)  # `make fuzz` tries 2,000


def problems(seeds: range) -> Iterator[str]:
    for seed in seeds:
        outcome = check(seed)
        if outcome.problem:
            yield f"python -m tests.fuzz --only {seed}: {outcome.problem}"


def test_random_models_are_exact() -> None:
    assert list(problems(SEEDS)) == []


class AddedUp:
    """A form with a wrong norm: the sum of squared norms of its uses, without cross terms."""

    def __init__(self, whole: Any, uses: list[Any]) -> None:
        self._whole, self._uses = whole, uses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def squared_norms(self, budget: Any) -> torch.Tensor:
        return torch.stack([use.squared_norms(budget) for use in self._uses]).sum(0)


def test_a_missing_cross_term_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stream.joined

    def planted(name: str, parameter: Any, uses: list[Contribution]) -> Contribution:
        whole = honest(name, parameter, uses)
        if len(uses) == 1:
            return whole
        alone = [honest(name, parameter, [use]).form for use in uses]
        return Contribution(AddedUp(whole.form, alone), whole.path)  # type: ignore[arg-type]

    monkeypatch.setattr(stream, "joined", planted)
    assert any(": norm of " in problem for problem in problems(SEEDS))


def test_the_same_seed_gives_the_same_model() -> None:
    for seed in range(10):
        first = compose(seed)
        compose(seed + 1)
        torch.rand(3)
        again = compose(seed)
        assert str(first.model) == str(again.model) and first.traits == again.traits
        torch.testing.assert_close(first.model.state_dict(), again.model.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(first.batches, again.batches, rtol=0, atol=0)


def test_composing_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    compose(0)
    assert torch.equal(before, torch.get_rng_state())


def test_two_seeds_give_two_models() -> None:
    assert len({str(compose(seed).model) for seed in range(20)}) == 20


def test_every_block_occurs_and_declares_its_traits() -> None:
    seen: set[type[Block]] = set()
    traits: set[str] = set()
    for seed in range(400):
        composed = compose(seed)
        seen |= {type(m) for m in composed.model.modules() if isinstance(m, Block)}
        traits |= composed.traits
    assert set(KINDS) <= seen
    assert traits == all_traits()


def test_a_refusal_is_a_mismatch_unless_the_block_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CoupledExamplesError("not this one")

    monkeypatch.setattr(checking, "per_example_gradients", refuse)
    assert check(0).problem == "refused: not this one"
    monkeypatch.setattr(Block, "refusable", "for this test")
    assert check(0).problem == "" and check(0).refused


def test_the_command_fails_on_a_mismatch_and_names_the_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_is_wrong(seed: int) -> checking.Outcome:
        return checking.Outcome(seed, frozenset(), problem="planted" if seed == 7 else "")

    monkeypatch.setattr(run, "check", first_is_wrong)
    assert run.main(["--models", "2", "--seed", "7"]) == 1
    assert "--only 7: planted" in capsys.readouterr().out
    assert run.main(["--only", "8"]) == 0


def test_a_long_run_fails_on_too_little_coverage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "check", lambda seed: checking.Outcome(seed, frozenset()))
    assert run.main(["--models", str(run.ENOUGH_MODELS)]) == 1
    report = capsys.readouterr().out.splitlines()[-1]
    assert "AddmmBackward0" in report and "folded batch" in report
    assert run.main(["--models", str(run.ENOUGH_MODELS - 1)]) == 0
