"""Sparsification: what is frozen, where, and that it stays there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise import Batch, PerExample, Quantile
from clipwise.clipping import Clipper, Strategy, noised_parts
from clipwise.clipping.contrib.sparse import Sparse
from clipwise.contrib import Adaptive, Multipliers, NormDecay, ReleasedNorms
from clipwise.errors import CheckpointError, ConfigurationError
from clipwise.privacy import effective_multiplier
from tests.clipping.policies import small_model
from tests.gradients.cases import trainable
from tests.runs import losses_of, network, parameters, private_run, same, sgd, train
from tests.sites import site

T = 10
Z = 1.3
STRATEGIES = [PerExample(0.7, "layer", sparse=Sparse(T)), Batch(0.7, parts="layer", sparse=Sparse(T))]
BY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
QUICK = settings(max_examples=30, deadline=None, derandomize=True)


def attach(strategy: Strategy, model: nn.Module) -> Clipper:
    clipper = strategy.attach(site(model))
    clipper.parts = noised_parts(clipper.bounds, trainable(model), Z, strategy.split, clipper.divisor)
    return clipper


def releases(clipper: Clipper, masks: dict[str, Tensor], length: int = T) -> list[dict[str, Tensor]]:
    """In units of the noise: half a unit up and down for what is to freeze, and steadily 3 for the rest."""
    noise = clipper.noise
    return [
        {n: noise[n] * torch.where(m, 0.5 * (-1) ** t, 3.0).double() for n, m in masks.items()} for t in range(length)
    ]


def random_masks(model: nn.Module, share: float = 0.5, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {n: torch.rand(p.shape, generator=random) < share for n, p in trainable(model).items()}


def freeze(clipper: Clipper, masks: dict[str, Tensor]) -> None:
    """Let releases freeze these entries, and only these."""
    for release in releases(clipper, masks):
        clipper.learn(release)


def frozen_in(clipper: Clipper, model: nn.Module) -> dict[str, Tensor]:
    """Masks of all parameters, also of those of which nothing is frozen."""
    return {n: clipper.frozen.get(n, torch.zeros_like(p, dtype=torch.bool)) for n, p in trainable(model).items()}


def run_with(strategy: Strategy, model: nn.Module, **options: Any) -> Any:
    """A run with so much noise that little else can be seen."""
    options = {"noise_multiplier": 20.0, "seed": 5} | options
    optimizer = sgd(model, lr=0.05, momentum=0.9, weight_decay=0.1)
    return private_run(model, optimizer, clipping=strategy, **options)[1]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("every", [0, None, "step", 1.5, True], ids=repr)
def test_a_window_is_an_epoch_or_so_many_steps(every: Any) -> None:
    with pytest.raises(ConfigurationError, match="Sparse: every="):
        Sparse(every)


@pytest.mark.parametrize("within", [0, -1, math.nan, math.inf, "1", True], ids=repr)
def test_within_is_a_positive_number(within: Any) -> None:
    with pytest.raises(ConfigurationError, match="Sparse: within must be a finite number that is greater than 0"):
        Sparse(within=within)


@pytest.mark.parametrize("after", [-1, 0.5, None, True], ids=repr)
def test_after_is_a_number_of_releases(after: Any) -> None:
    with pytest.raises(ConfigurationError, match="Sparse: after must be a whole number"):
        Sparse(after=after)


@pytest.mark.parametrize("strategy", [PerExample, Batch])
def test_a_short_window_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match="a window of 9 releases, which is too short"):
        strategy(sparse=Sparse(9)).attach(site(small_model()))


@pytest.mark.parametrize("strategy", [PerExample, Batch])
def test_something_else_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match="sparse must be Sparse"):
        strategy(sparse=True)


@pytest.mark.parametrize("method", ["bookkeeping", "reweight"])
def test_norms_without_written_gradients_are_refused(method: str) -> None:
    with pytest.raises(ConfigurationError, match=f"method='{method}' is not supported with sparse.*'instantiate'"):
        PerExample(method=method, sparse=Sparse())


def test_an_adaptive_bound_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is not supported with max_norm=Quantile"):
        PerExample(Quantile(), sparse=Sparse()).attach(site(small_model()))


def test_only_a_strategy_with_a_rule_adapts() -> None:
    """Fingerprints of other runs stay what they were."""
    for plain, strategy in ((PerExample(), PerExample(sparse=Sparse(20))), (Batch(), Batch(sparse=Sparse(20)))):
        assert "sparse" not in plain.describe()
        assert strategy.describe()["sparse"] == {"every": 20, "within": 1.0, "after": 0}


# ---------------------------------------------------------------- the rule


@BY_STRATEGY
def test_only_converged_entries_are_frozen(strategy: Strategy) -> None:
    model = small_model()
    clipper, masks = attach(strategy, model), random_masks(model)
    changed = [clipper.learn(r) for r in releases(clipper, masks)]
    assert changed == [False] * (T - 1) + [True]
    assert same(frozen_in(clipper, model), masks)


@pytest.mark.parametrize(
    "drift, swing, freezes",
    [(0.0, 1.0, True), (0.3, 1.0, True), (0.33, 1.0, False), (0.0, 1.2, True), (0.0, 1.25, False)],
)
def test_the_limits_are_those_of_the_formula(drift: float, swing: float, freezes: bool) -> None:
    """T = 10, a = 1: |mean| <= 10^-1/2 = 0.316, mean of squares <= 1 + 20^1/2 / 10 = 1.447 = 1.203^2."""
    model = small_model()
    clipper = attach(PerExample(0.7, sparse=Sparse(T)), model)
    noise = clipper.noise
    amplitude = math.sqrt(swing**2 - drift**2)
    for t in range(T):
        value = drift + amplitude * (-1) ** t
        clipper.learn({n: torch.full_like(p, value * noise[n]) for n, p in trainable(model).items()})
    assert bool(clipper.frozen) is freezes


def test_the_share_of_pure_noise_that_is_frozen_follows_the_formula() -> None:
    """P(|N| <= a) P(N <= a): the two sums are uncorrelated and nearly normal."""
    model = nn.Linear(80, 60)
    for within, expected in ((0.5, 0.383 * 0.691), (1.0, 0.683 * 0.841), (2.0, 0.954 * 0.977)):
        clipper = attach(PerExample(0.7, sparse=Sparse(100, within)), model)
        random = torch.Generator().manual_seed(0)
        for _ in range(100):
            noise = clipper.noise
            clipper.learn({n: noise[n] * torch.randn(p.shape, generator=random) for n, p in trainable(model).items()})
        assert float(clipper.frozen["weight"].float().mean()) == pytest.approx(expected, abs=0.03)


def test_it_starts_after_the_given_number_of_releases() -> None:
    model = small_model()
    clipper = attach(PerExample(0.7, sparse=Sparse(T, after=7)), model)
    masks = random_masks(model)
    changed = [clipper.learn(r) for r in releases(clipper, masks, length=T + 7)]
    assert changed == [False] * (T + 6) + [True]


def test_without_noise_nothing_is_frozen() -> None:
    model = small_model()
    strategy = PerExample(0.7, sparse=Sparse(T))
    clipper = strategy.attach(site(model))
    clipper.parts = noised_parts(clipper.bounds, trainable(model), 0.0, strategy.split, clipper.divisor)
    for _ in range(3 * T):
        assert not clipper.learn({n: torch.zeros_like(p) for n, p in trainable(model).items()})


def test_what_is_not_finite_is_not_frozen() -> None:
    model = small_model()
    clipper = attach(PerExample(0.7, sparse=Sparse(T)), model)
    for t in range(T):
        bad = math.nan if t == 3 else 0.0
        clipper.learn({n: torch.full_like(p, bad) for n, p in trainable(model).items()})
    assert not clipper.frozen


def test_frozen_entries_do_not_thaw() -> None:
    model = small_model()
    clipper = attach(PerExample(0.7, sparse=Sparse(T)), model)
    first, second = random_masks(model, 0.3, seed=1), random_masks(model, 0.3, seed=2)
    freeze(clipper, first)
    clipper.settle()
    held = parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)  # what a window later averages is another value
    freeze(clipper, second)
    clipper.settle()
    assert same(frozen_in(clipper, model), {n: first[n] | second[n] for n in first})
    for n, p in trainable(model).items():
        assert torch.equal(p[first[n]], held[n][first[n]])


# ---------------------------------------------------------------- bounds


@QUICK
@given(st.floats(0, 1), st.sampled_from(["all", "layer", "tensor"]), st.sampled_from([PerExample, Batch]), st.data())
def test_bounds_shrink_with_the_entries_that_are_left(share: float, parts: str, kind: Any, data: Any) -> None:
    model = small_model()
    strategy = kind(0.7, parts=parts, sparse=Sparse(T))
    clipper, masks = attach(strategy, model), random_masks(model, share, data.draw(st.integers(0, 99)))
    before = {b.name: b.sensitivity for b in clipper.bounds}
    freeze(clipper, masks)
    for b in clipper.bounds:
        whole = sum(masks[n].numel() for n in b.parameters)
        left = whole - sum(int(masks[n].sum()) for n in b.parameters)
        assert b.sensitivity == pytest.approx(before[b.name] * math.sqrt(max(left, 1) / whole))
        assert left == (whole if b.size is None else b.size)
    for split in ("optimal", "equal"):
        found = noised_parts(clipper.bounds, trainable(model), Z, split, clipper.divisor)
        assert effective_multiplier(found) >= Z
        assert effective_multiplier(found) == pytest.approx(Z)


def test_the_optimal_split_counts_the_entries_that_are_left() -> None:
    """The same as that of a model that never had the others: S_k and d_k' decide."""
    model = small_model()
    clipper = attach(PerExample(0.7, "tensor", sparse=Sparse(T)), model)
    freeze(clipper, random_masks(model))
    found = noised_parts(clipper.bounds, trainable(model), Z, "optimal", clipper.divisor)
    total = sum(b.sensitivity * math.sqrt(b.size or 1) for b in clipper.bounds)
    expected = [Z * math.sqrt(b.sensitivity / math.sqrt(b.size or 1) * total) for b in clipper.bounds]
    assert [p.noise_std for p in found] == pytest.approx(expected)


def test_other_rules_still_apply() -> None:
    model = small_model()
    clipper = attach(PerExample(NormDecay(0.7, 0.5, every=4), sparse=Sparse(T)), model)
    masks = random_masks(model)
    changed = [clipper.learn(r) for r in releases(clipper, masks, length=12)]
    assert [t for t, c in enumerate(changed, 1) if c] == [4, 8, 10, 12]
    left = sum(int((~m).sum()) for m in masks.values()) / sum(m.numel() for m in masks.values())
    assert clipper.bounds[0].sensitivity == pytest.approx(0.7 * 0.5**3 * math.sqrt(left))


# ---------------------------------------------------------------- through the engine


@BY_STRATEGY
def test_frozen_entries_stay_at_their_average(strategy: Strategy) -> None:
    """Whatever momentum and weight decay do to the others."""
    model = network()
    private = run_with(strategy, model)
    visited = []
    for _ in range(T):
        visited.append(parameters(model))
        train(model, private, 1)
    frozen = frozen_in(private._context.clipper, model)
    assert 0.2 < sum(int(m.sum()) for m in frozen.values()) / sum(p.numel() for p in model.parameters()) < 0.9
    for step in range(T - 1):
        for n, p in trainable(model).items():
            average = torch.stack([v[n] for v in visited]).mean(0)
            assert torch.allclose(p[frozen[n]], average[frozen[n]], rtol=1e-5, atol=1e-6)
        before = parameters(model)
        train(model, private, 1)
        for n, p in trainable(model).items():
            assert p.grad is not None
            assert bool((p.grad == 0).eq(frozen[n]).all()), step
            assert bool((p == before[n]).eq(frozen[n]).all()), step


def test_an_update_of_ones_own_is_put_back_with_the_next_batch() -> None:
    model = network()
    private = run_with(STRATEGIES[0], model)
    train(model, private, T)
    before, frozen = parameters(model), frozen_in(private._context.clipper, model)
    for steps, batch in enumerate(private.loader):
        for n, p in trainable(model).items():
            assert torch.equal(p[frozen[n]], before[n][frozen[n]])
        if steps == 3:
            break
        private.backward(losses_of(model, batch))
        private.optimizer.step()


@pytest.mark.parametrize("strategy", [*STRATEGIES,
                                      PerExample(0.7, Multipliers(ReleasedNorms(), every=5), sparse=Sparse(T)),
                                      PerExample(0.7, Adaptive(ReleasedNorms(), every=3), sparse=Sparse(T))],
                         ids=["per example", "batch", "multipliers", "adaptive"])  # fmt: skip
def test_every_step_has_the_multiplier_that_is_charged(strategy: Strategy) -> None:
    model = network()
    private = run_with(strategy, model)
    for _ in range(3 * T + 2):
        train(model, private, 1)
        assert effective_multiplier(private.parts()) >= private.noise_multiplier
        assert effective_multiplier(private.parts()) == pytest.approx(private.noise_multiplier)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_run_continues_when_everything_is_frozen() -> None:
    model = network()
    private = run_with(PerExample(0.7, "layer", sparse=Sparse(T, within=1e3)), model)
    train(model, private, T)
    before = parameters(model)
    train(model, private, 3)
    assert same(before, parameters(model))
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "strategy",
    [*STRATEGIES, Batch(0.7, microbatches=4, parts="layer", sparse=Sparse(T))],  # the last one adds up in float64
    ids=["per example", "batch", "microbatches"],
)
@pytest.mark.parametrize("made", [2 * T, 2 * T + 3])
def test_a_resumed_run_has_the_same_frozen_entries(strategy: Strategy, made: int, tmp_path: Path) -> None:
    """Bit for bit, past the end of the window it was stopped in: else one noise would be on two different sums."""
    model = network()
    private = run_with(strategy, model, ledger=tmp_path / "ledger")
    train(model, private, made)
    saved, weights = private.state_dict(), model.state_dict()
    weights = {n: w.clone() for n, w in weights.items()}
    frozen, parts = dict(private._context.clipper.frozen), private.parts()
    private.close()

    straight = network()
    whole = run_with(strategy, straight)
    more = 2 * T - 1
    train(straight, whole, made + more)

    other = network(seed=3)
    again = run_with(strategy, other, ledger=tmp_path / "ledger")
    other.load_state_dict(weights)  # before the run's: with other weights its key is not used again
    again.load_state_dict(saved)
    assert frozen and same(dict(again._context.clipper.frozen), frozen)
    assert again.parts() == parts
    train(other, again, more)
    assert same(parameters(other), parameters(straight))
    assert same(dict(again._context.clipper.frozen), dict(whole._context.clipper.frozen))


def test_a_checkpoint_before_the_update_of_ones_own_keeps_frozen_entries(tmp_path: Path) -> None:
    """Momentum has moved them and they are not restored yet: the checkpoint has their values."""
    model, straight, other = network(), network(), network()
    strategy = STRATEGIES[0]

    def stray(model: nn.Module, private: Any) -> None:
        train(model, private, T)
        batch = next(iter(private.loader))
        private.backward(losses_of(model, batch))
        private.optimizer.step()

    private, whole = run_with(strategy, model, ledger=tmp_path / "ledger"), run_with(strategy, straight)
    stray(model, private)
    stray(straight, whole)
    saved = private.state_dict()
    private.close()
    again = run_with(strategy, other, ledger=tmp_path / "ledger")
    other.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    train(other, again, 2)
    train(straight, whole, 2)
    assert same(parameters(other), parameters(straight))


def test_the_ledger_holds_no_window(tmp_path: Path) -> None:
    """It is as long as the model."""
    model = network()
    private = run_with(STRATEGIES[0], model, ledger=tmp_path / "ledger")
    train(model, private, 3)
    private.close()
    assert "averages" not in (tmp_path / "ledger").read_text()


def test_the_state_is_plain_and_public() -> None:
    model = small_model()
    clipper = attach(STRATEGIES[0], model)
    masks = random_masks(model)
    freeze(clipper, masks)
    state = json.loads(json.dumps(clipper.state_dict()))
    other = STRATEGIES[0].attach(site(small_model()))
    assert other.load_state_dict(state)
    assert same(frozen_in(other, model), masks) and other.bounds == clipper.bounds


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"frozen": None},
        {"frozen": {"entries": {}}},
        {"frozen": {"wait": 0, "entries": {"0.weight": "AA=="}}},
        {"frozen": {"wait": 0, "entries": {"0.weight": "?"}}},
        {"frozen": {"wait": 0, "entries": {"nobody": "AA=="}}},
        {"frozen": {"wait": 0, "entries": {}, "held": {}}},
        {"frozen": {"wait": 0, "entries": {}, "held": {}, "window": {"length": 1}}},
        {"frozen": {"wait": 0, "entries": {"0.weight": "AAAAAA=="}, "held": {}, "window": {"length": 0}}},
    ],
    ids=repr,
)
def test_a_damaged_state_is_refused(damaged: dict[str, Any]) -> None:
    clipper = attach(STRATEGIES[0], small_model())
    with pytest.raises(CheckpointError, match="damaged"):
        clipper.load_state_dict(damaged)


def test_a_state_brings_back_what_the_bounds_follow_besides() -> None:
    strategy = PerExample(NormDecay(0.7, 0.5, every=3), "layer", sparse=Sparse(T))
    one, other = (attach(strategy, small_model()) for _ in range(2))
    freeze(one, random_masks(small_model()))
    assert other.load_state_dict(one.state_dict()) and other.bounds == one.bounds
