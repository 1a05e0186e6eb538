"""A bound that follows a quantile: what it releases, what it learns, and that a run survives with it."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clipwise import PerExample, Private, Quantile
from clipwise.clipping import noised_parts
from clipwise.engine import checkpoint
from clipwise.errors import CheckpointError, ConfigurationError, PrivacyWarning
from clipwise.gradients import METHODS
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Part, effective_multiplier, split_noise
from tests.clipping.test_per_example import attached, model
from tests.gradients.cases import losses, oracle
from tests.runs import SIZE, data, gradients, losses_of, network, parameters, private_run, same, train
from tests.sites import site

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
PARTS: list[Any] = ["all", "layer", "tensor", [["0.weight"], ["0.bias", "2"]]]
L = 8  # the expected batch size of `private_run`


def quantile(**options: Any) -> Quantile:
    """With a count noise that suits batches of 8."""
    return Quantile(**{"count_noise": 0.4, "initial": 2.0, **options})


def norms_of(private: Private) -> dict[str, float]:
    norms: dict[str, float] = private._context.clipper.state_dict()["norms"]
    return dict(norms)


def count_parts(private: Private) -> list[Part]:
    return [p for p in private.parts() if not p.parameters]


# What is accepted


@pytest.mark.parametrize("name", ["target", "initial", "learning_rate", "count_noise", "minimum", "maximum"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", None, torch.tensor(1.0)], ids=repr)
def test_every_setting_is_a_positive_finite_number(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"Quantile: {name} must be a finite number that is greater than 0"):
        Quantile(**{name: value})


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"target": 1.0}, "target must be .* less than 1, not 1.0"),
        ({"initial": 2.0, "maximum": 1.0}, "initial=2.0 must lie between"),
        ({"initial": 0.1, "minimum": 0.2}, "initial=0.1 must lie between"),
        ({"minimum": 1e-40}, "minimum must be .* at least 1e-30"),
        ({"maximum": 1e40}, "maximum must be .* at most 1e"),
    ],
)
def test_settings_that_make_no_sense_together(setting: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Quantile(**setting)


def test_a_quantile_for_one_part_only_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_norm must be a finite number that is at least"):
        PerExample({"0": 1.0, "2": Quantile()}, parts="layer")  # type: ignore[dict-item]


# What is released


@pytest.mark.slow
@QUICK
@given(
    st.sampled_from(range(len(PARTS))),
    st.sampled_from(["clip", "normalize"]),
    st.floats(0.05, 20),
    st.integers(0, 7),
    st.integers(0, 99),
)
def test_the_count_is_that_of_the_definition(number: int, mode: str, C: float, B: int, seed: int) -> None:
    on = model()
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    clipper = attached(PerExample(Quantile(initial=C), PARTS[number], mode=mode), on)
    plain = attached(PerExample(C, PARTS[number], mode=mode), on)
    total, gradient = (c.clipped_sum(losses(on, (x,))[:B]) for c in (clipper, plain))
    assert same({n: total.pop(n) for n in gradient}, gradient)  # the gradient is that of a fixed max_norm
    truth = {n: g[:B] for n, g in oracle(on, (x,)).items()}
    for bound in plain.bounds:
        norms = torch.stack([truth[n].flatten(1).norm(dim=1) for n in bound.parameters]).norm(dim=0)
        expected = sum(min(max(1.5 - float(n) / bound.sensitivity, 0), 1) - 0.5 for n in norms)
        assert total.pop(f"count of {bound.name}").tolist() == pytest.approx([expected], abs=1e-9)
    assert not total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("parts", PARTS, ids=repr)
def test_every_method_counts_the_same(method: str, parts: Any) -> None:
    on, x = model(), torch.randn(9, 4, dtype=torch.float64)
    found = [
        attached(PerExample(quantile(), parts, method=m), on).clipped_sum(losses(on, (x,))) for m in (method, "loop")
    ]
    counts = [{n: float(t) for n, t in total.items() if n.startswith("count of")} for total in found]
    assert counts[0] == pytest.approx(counts[1], abs=1e-9) and counts[0]


@pytest.mark.slow
def test_copies_of_an_example_whose_norm_is_the_bound_move_nothing_else() -> None:
    """A norm's last digits depend on the size of the batch: a count that jumped at C would move by all copies."""
    on, x = model().float(), torch.randn(1, 4)
    truth = oracle(model().float(), (x,))
    norm = math.hypot(*(float(g.norm()) for g in truth.values()))
    for C in (norm * (1 + k * 2**-24) for k in range(-40, 41)):
        clipper = attached(PerExample(Quantile(initial=C)), on)
        counts = [float(clipper.clipped_sum(losses(on, (x.repeat(B, 1),)))["count of all"]) for B in (1, 2, 8, 9)]
        assert abs(counts[1] - counts[0]) <= 0.5 and abs(counts[3] - counts[2]) <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_an_example_that_is_not_finite_counts_as_clipped_in_every_part(spoil: float) -> None:
    on, x = model(), torch.randn(5, 4, dtype=torch.float64)
    clipper = attached(PerExample(Quantile(initial=1e6), "layer"), on)
    factors = torch.tensor([1, 1, spoil, 1, 1], dtype=torch.float64)
    total = clipper.clipped_sum(losses(on, (x,)) * factors)
    assert [float(total[f"count of {part}"]) for part in ("0", "2")] == [1.5, 1.5]


def test_an_example_that_is_not_finite_in_one_part_counts_as_clipped_in_every_part() -> None:
    """An infinite input saturates tanh: 0 times infinity in the first layer, an ordinary gradient in the last."""
    on, x = model(), torch.randn(5, 4, dtype=torch.float64)
    x[2, 0] = math.inf
    total = attached(PerExample(Quantile(initial=1e6), "layer"), on).clipped_sum(losses(on, (x,)))
    assert [float(total[f"count of {part}"]) for part in ("0", "2")] == [1.5, 1.5]


@pytest.mark.parametrize("parts", PARTS, ids=repr)
def test_bounds_follow_the_norms(parts: Any) -> None:
    strategy = PerExample(Quantile(initial=3.0), parts)
    for adjacency, factor in ((Adjacency.ZERO_OUT, 1.0), (Adjacency.REPLACE_ONE, 2.0)):
        clipper = attached(strategy, model(), adjacency)
        K = len(clipper.bounds) // 2
        for b in clipper.bounds:
            expected = factor * 3 / math.sqrt(K) if b.parameters else factor / 2
            assert math.isclose(b.sensitivity, expected)
        means = {b.name: torch.tensor([0.25]) for b in clipper.bounds if not b.parameters}
        before = clipper.bounds
        assert clipper.learn(means)
        for old, new in zip(before, clipper.bounds, strict=True):
            moved = math.exp(-0.2 * 0.25) if old.parameters else 1.0
            assert new.name == old.name and math.isclose(new.sensitivity, moved * old.sensitivity)


# The noise of it


@pytest.mark.parametrize("split", ["equal", "optimal"])
@pytest.mark.parametrize("parts", PARTS, ids=repr)
@pytest.mark.parametrize(("sampling", "S"), [("poisson", 0.5), ("fixed-size", 1.0)])
def test_the_joint_multiplier_is_the_given_one(parts: Any, split: str, sampling: str, S: float) -> None:
    z = 0.9
    clipping = PerExample(quantile(count_noise=0.5), parts, split)
    on, private = private_run(clipping=clipping, sampling=sampling, noise_multiplier=z)
    for _ in range(6):
        assert private.noise_multiplier == z <= effective_multiplier(private.parts()) <= z * (1 + 1e-8)
        counts = count_parts(private)
        assert all(p.noise_std == 0.5 * L and p.sensitivity == S for p in counts)
        rest = [p for p in private.parts() if p.parameters]
        assert [p.sensitivity for p in rest] == [2 * S * C for C in norms_of(private).values()]
        left = (z**-2 - len(counts) * (S / (0.5 * L)) ** 2) ** -0.5
        sizes = [sum(dict(on.named_parameters())[n].numel() for n in p.parameters) for p in rest]
        expected = split_noise([p.sensitivity for p in rest], sizes, left, split)
        assert [p.noise_std for p in rest] == pytest.approx(expected)
        before = norms_of(private)
        train(on, private, 1)
        assert norms_of(private) != before
    assert len(private._context.ledger.history()) == 1  # one event for all of them


@QUICK
@given(st.floats(1e-3, 1e3), st.floats(1.001, 1e3), st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=9))
def test_rounding_never_brings_a_step_below_its_event(z: float, margin: float, norms: list[float]) -> None:
    on = {str(k): nn.Parameter(torch.zeros(k + 1)) for k in range(len(norms))}
    count_noise = z * 0.5 * math.sqrt(len(norms)) / L * margin
    strategy = PerExample(Quantile(count_noise=count_noise, minimum=1e-30, maximum=1e30), "tensor")
    clipper = strategy.attach(site(on))
    given_norms = dict(zip(on, norms, strict=True))
    clipper._constants.norms.update(given_norms)  # type: ignore[attr-defined]
    clipper._restate()  # type: ignore[attr-defined]
    for split in ("equal", "optimal"):
        parts = noised_parts(clipper.bounds, on, z, split, L)
        assert z <= effective_multiplier(parts) <= z * (1 + 1e-8)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize("parts", ["all", "layer"])
def test_counts_that_use_up_the_multiplier_are_refused(tmp_path: Path, sampling: str, parts: str) -> None:
    z, K, S = 2.0, {"all": 1, "layer": 2}[parts], {"poisson": 0.5, "fixed-size": 1.0}[sampling]
    least = z * S * math.sqrt(K) / L
    options = {"noise_multiplier": z, "sampling": sampling, "ledger": tmp_path / "run.ledger"}
    with pytest.raises(ConfigurationError, match=r"count_noise is too small.*Use count_noise=") as error:
        private_run(clipping=PerExample(quantile(count_noise=0.999 * least), parts), **options)
    assert not (tmp_path / "run.ledger").exists()
    advice = float(str(error.value).split("Use count_noise=")[1].split()[0])
    for enough in (1.001 * least, advice):
        _, private = private_run(
            clipping=PerExample(quantile(count_noise=enough), parts), **{**options, "ledger": None}
        )
        assert private.noise_multiplier == z


def test_an_empty_batch_releases_a_noised_count() -> None:
    """The batch is empty, so f is 1/2 plus noise: C moves by noise alone, and not at all without it."""
    moved = []
    for z in (0.9, 0.0):
        clipping = PerExample(quantile(count_noise=1e9))  # the expected batch size is tiny, and so is L
        on, private = private_run(clipping=clipping, sample_rate=1e-9, noise_multiplier=z, seed=1)
        for batch in private.loader:
            assert len(batch[0]) == 0
            private.step(losses_of(on, batch))
            break
        moved.append(norms_of(private)["all"])
    assert moved[0] != 2.0 and math.isclose(moved[1], 2.0)


@pytest.mark.slow
def test_the_noise_of_the_count_has_the_stated_size() -> None:
    """From f = (log C_before - log C_after) / learning_rate + target, against the count without noise."""
    rate, rounds, noise = 1e-3, 300, []
    clipping = PerExample(quantile(initial=1e6, maximum=1e9, learning_rate=rate))  # no example is clipped
    on, private = private_run(clipping=clipping, sampling="full", seed=5, noise_multiplier=4.0)
    for _ in range(rounds):
        before = math.log(norms_of(private)["all"])
        for batch in private.loader:
            private.backward(losses_of(on, batch))
        on.zero_grad()
        noise.append((before - math.log(norms_of(private)["all"])) / rate + 0.5 - 1.0)
    found = torch.tensor(noise)
    assert abs(float(found.mean())) < 4 * 0.4 / math.sqrt(rounds)
    assert abs(float(found.std()) / 0.4 - 1) < 4 / math.sqrt(2 * rounds)
    assert count_parts(private)[0].noise_std == pytest.approx(0.4 * SIZE)


# What it learns


@pytest.mark.slow
def test_without_noise_it_finds_the_quantile() -> None:
    on = network()
    frozen = torch.optim.SGD(on.parameters(), lr=0.0)
    for target in (0.2, 0.5, 0.8):
        clipping = PerExample(quantile(target=target, initial=50.0))
        on, private = private_run(on, frozen, clipping=clipping, sampling="full", noise_multiplier=0)
        train(on, private, 120)
        on.zero_grad()
        x, y = data().tensors
        each = [
            torch.autograd.grad(losses_of(on, (x[i : i + 1], y[i : i + 1])).sum(), list(on.parameters()))
            for i in range(SIZE)
        ]
        norms = torch.tensor([math.hypot(*(float(g.norm()) for g in one)) for one in each])
        within = float((1.5 - norms / norms_of(private)["all"]).clamp(0, 1).double().mean())
        assert abs(within - target) <= 2 / SIZE


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("parts", ["all", "layer"])
def test_one_update_by_hand(parts: Any, mode: str) -> None:
    """Divided by the expected size, whatever was drawn."""
    clipping = PerExample(quantile(initial=1.0, target=0.3, learning_rate=0.7), parts, mode=mode)
    on, private = private_run(clipping=clipping, noise_multiplier=0)
    drawn = set()
    for batch in private.loader:
        before = norms_of(private)
        sums = private._context.clipper.clipped_sum(losses_of(on, batch))
        private.step(losses_of(on, batch))
        drawn.add(len(batch[0]))
        for part, C in norms_of(private).items():
            fraction = float(sums[f"count of {part}"]) / L + 0.5
            assert math.isclose(C, before[part] * math.exp(-0.7 * (fraction - 0.3)))
    assert len(drawn) > 1


@QUICK
@given(st.floats(-1e300, 1e300), st.sampled_from(["all", "layer"]), st.floats(1e-3, 1e300))
def test_the_bound_never_leaves_its_limits(mean: float, parts: str, rate: float) -> None:
    rule = Quantile(minimum=0.3, maximum=7.0, learning_rate=rate)
    clipper = attached(PerExample(rule, parts), model())
    K = {"all": 1, "layer": 2}[parts]
    for sign in (1, -1, -1, 1):
        means = {b.name: torch.tensor([sign * mean]).double() for b in clipper.bounds if not b.parameters}
        clipper.learn(means)
        for b in clipper.bounds:
            assert not b.parameters or 0.3 / math.sqrt(K) <= b.sensitivity <= 7 / math.sqrt(K)


def test_a_long_walk_ends_at_the_limit() -> None:
    clipper = attached(PerExample(Quantile(minimum=0.5, maximum=2.0)), model())
    for mean, limit in ((-0.5, 2.0), (0.5, 0.5)):
        for _ in range(1000):
            clipper.learn({"count of all": torch.tensor([mean])})
        assert clipper.bounds[0].sensitivity == limit


# A run with it


def test_a_fixed_max_norm_releases_what_it_did() -> None:
    """Nothing is counted, learned or kept."""
    for parts in PARTS:
        clipping = PerExample(1.5, parts)
        clipper = attached(clipping, model())
        assert clipper.state_dict() == {} and not clipper.learn({}) and not clipper.load_state_dict({})
        on, private = private_run(clipping=clipping)
        before = private.parts()
        sizes = [sum(dict(on.named_parameters())[n].numel() for n in p.parameters) for p in before]
        stds = split_noise([p.sensitivity for p in before], sizes, 1.0, "optimal")
        assert [p.noise_std for p in before] == pytest.approx(stds, rel=1e-11)
        assert all(p.parameters for p in before)
        train(on, private, 2)
        assert private.parts() == before
        assert private.state_dict()["configuration"]["strategy"] == clipping.describe()


@pytest.mark.parametrize("parts", ["all", "layer"])
@pytest.mark.parametrize("z", [0.0, 0.9])
def test_pieces_of_a_batch_change_nothing(parts: str, z: float) -> None:
    """The pieces' counts add up, and C stays within a batch."""
    found = []
    for pieces in (None, 3):
        clipping = PerExample(quantile(initial=1.0), parts)
        on, private = private_run(
            network(torch.float64),
            dataset=data(dtype=torch.float64),
            clipping=clipping,
            noise_multiplier=z,
            max_physical_batch_size=pieces,
        )
        private._context.keys.key = NoiseKey.from_seed(7, b"")
        walk = []
        while private.steps < 8:
            for batch in private.loader.pieces():
                before = norms_of(private)
                if not private.step(losses_of(on, batch)):
                    assert norms_of(private) == before
                else:
                    walk.append(norms_of(private))
        found.append((parameters(on), walk))
    for whole, cut in zip(found[0][1], found[1][1], strict=True):
        assert whole == pytest.approx(cut, rel=1e-9)
    for name, p in found[0][0].items():
        torch.testing.assert_close(p, found[1][0][name])


def test_a_seed_repeats_the_run() -> None:
    runs = []
    for seed in (3, 3, 4):
        on, private = private_run(clipping=PerExample(quantile(), "layer"), seed=seed)
        train(on, private, 7)
        runs.append((norms_of(private), parameters(on)))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


def go_on(folder: Path, clipping: PerExample, fresh: bool) -> tuple[nn.Module, Private]:
    on, private = private_run(network(seed=9), clipping=clipping, ledger=folder / "run.ledger")
    state = checkpoint.load(folder / "run.pt")
    on.load_state_dict(state["model"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrivacyWarning)
        private.load_state_dict(state["private"])
    assert bool(caught) == fresh
    return on, private


def stop(folder: Path, on: nn.Module, private: Private) -> None:
    checkpoint.save(folder / "run.pt", {"model": on.state_dict(), "private": private.state_dict()})
    private.close()


@pytest.mark.parametrize("parts", ["all", "layer"])
def test_a_clean_stop_changes_nothing(tmp_path: Path, parts: str) -> None:
    clipping = PerExample(quantile(), parts)
    on, private = private_run(clipping=clipping, ledger=tmp_path / "run.ledger")
    straight, twin = private_run(clipping=clipping)
    twin._context.keys.key = NoiseKey(private._context.keys.key.secret_bytes())
    train(straight, twin, 9)
    for steps in (2, 3):
        train(on, private, steps)
        norms, stated = norms_of(private), private.parts()
        stop(tmp_path, on, private)
        on, private = go_on(tmp_path, clipping, fresh=False)
        assert norms_of(private) == norms and private.parts() == stated
    train(on, private, 4)
    assert norms_of(private) == norms_of(twin) and same(parameters(on), parameters(straight))


def test_another_bound_in_the_checkpoint_takes_a_fresh_key(tmp_path: Path) -> None:
    clipping = PerExample(quantile())
    on, private = private_run(clipping=clipping, ledger=tmp_path / "run.ledger")
    train(on, private, 3)
    secret = private._context.keys.key.secret_bytes()
    stop(tmp_path, on, private)
    state = checkpoint.load(tmp_path / "run.pt")
    state["private"]["configuration"]["strategy"]["norms"]["all"] *= 1.5
    checkpoint.save(tmp_path / "run.pt", state)
    _, private = go_on(tmp_path, clipping, fresh=True)
    assert private._context.keys.key.secret_bytes() != secret
    assert norms_of(private) == state["private"]["configuration"]["strategy"]["norms"]
    assert private.parts()[0].sensitivity == norms_of(private)["all"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PerExample(quantile()), PerExample(quantile(target=0.7))),
        (PerExample(quantile()), PerExample(quantile(), "layer")),
        (PerExample(quantile()), PerExample(1.0)),
        (PerExample(1.0), PerExample(quantile())),
    ],
    ids=["target", "parts", "to fixed", "from fixed"],
)
def test_another_strategy_begins_anew_with_a_fresh_key(tmp_path: Path, old: PerExample, new: PerExample) -> None:
    on, private = private_run(clipping=old, ledger=tmp_path / "run.ledger")
    train(on, private, 3)
    stop(tmp_path, on, private)
    _, begun = private_run(clipping=new)
    on, private = go_on(tmp_path, new, fresh=True)
    assert private.parts() == begun.parts() and private.steps == 3
    train(on, private, 2)


@pytest.mark.parametrize("norms", [..., None, {}, {"all": "1"}, {"all": math.nan}, {"all": 1e7}, {"0": 1.0}], ids=repr)
def test_damaged_norms_are_refused_before_anything_changes(norms: Any) -> None:
    on, private = private_run(clipping=PerExample(quantile()))
    train(on, private, 3)
    state = private.state_dict()
    if norms is ...:
        del state["configuration"]["strategy"]["norms"]
    else:
        state["configuration"]["strategy"]["norms"] = norms
    copied, other = private_run(clipping=PerExample(quantile()))
    weights, before = copied.state_dict(), repr(other.state_dict())
    weights = {name: t.clone() for name, t in weights.items()}
    copied.load_state_dict(on.state_dict())
    with pytest.raises(CheckpointError, match="damaged"):
        other.load_state_dict(state)
    copied.load_state_dict(weights)
    assert repr(other.state_dict()) == before


def test_no_noise_is_for_debugging() -> None:
    on, private = private_run(clipping=PerExample(quantile(), "layer"), noise_multiplier=0)
    train(on, private, 3)
    assert private.spent().epsilon == math.inf
    assert all(p.noise_std == 0 for p in private.parts()) and len(count_parts(private)) == 2


def test_a_budget_is_kept() -> None:
    on, private = private_run(clipping=PerExample(quantile(count_noise=1.0)), epsilon=3.0, delta=1e-5, epochs=2)
    train(on, private, 10)
    assert private.spent().epsilon <= 3.0


def test_gradients_are_scaled_by_the_bound_of_their_step() -> None:
    """What is written is the sum clipped at the C that was in force, not at the one learned from it."""
    on, private = private_run(
        clipping=PerExample(quantile(initial=0.01, learning_rate=3.0)), sampling="full", noise_multiplier=0
    )
    for _ in range(3):
        C = norms_of(private)["all"]
        for batch in private.loader:
            expected = attached(PerExample(C), on).clipped_sum(losses_of(on, batch))
            private.backward(losses_of(on, batch))
        for name, g in gradients(on).items():
            torch.testing.assert_close(g, expected[name] / SIZE)
        on.zero_grad()


def test_the_statement_states_that_the_bound_adapts() -> None:
    on, private = private_run(clipping=PerExample(quantile()))
    train(on, private, 2)
    text = str(private.statement())
    assert "the clipped sum and the counts" in text and "max_norm adapts" in text
    assert "count of all: 0.5" in text
    plain = json.loads(json.dumps(private.statement().to_dict()))
    assert plain["strategy"]["norms"] == norms_of(private)
    assert plain["strategy"]["max_norm"]["target"] == 0.5
    assert "adapts" not in str(private_run()[1].statement())


def test_parts_list_the_count() -> None:
    _, private = private_run(clipping=PerExample(quantile(), "layer"))
    assert [(p.name, bool(p.parameters)) for p in private.parts()] == [
        ("0", True),
        ("2", True),
        ("count of 0", False),
        ("count of 2", False),
    ]


def test_settings_are_part_of_the_configuration() -> None:
    assert PerExample(Quantile()).describe() == PerExample(Quantile()).describe()
    described = [PerExample(q).describe() for q in (Quantile(), Quantile(target=0.4), Quantile(count_noise=1.0))]
    assert described[0] != described[1] and described[0] != described[2]
    assert all(json.loads(json.dumps(d)) == d for d in described)
