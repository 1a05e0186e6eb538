"""With frozen entries, one record moves the others by at most the stated bound, reaches it, and moves nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise import clipping
from clipwise.clipping import Clipper, PerExample, Strategy, noised_parts, per_example
from clipwise.clipping.contrib.sparse import Sparse, active_only
from clipwise.clipping.public import PublicData
from clipwise.errors import UnsupportedModelError
from clipwise.gradients import PerExampleGradients
from clipwise.privacy import Adjacency
from tests.clipping.contrib.test_sparse import T, freeze, random_masks
from tests.clipping.policies import loss, policy
from tests.gradients.cases import Case, trainable
from tests.runs import same
from tests.sites import site
from tests.soundness.neighbours import Batch, clipped_sum
from tests.soundness.test_bounded import FEW, SIZE, adversaries, neighbours, ordinary
from tests.soundness.test_parts_bounded import DEEP, SLACK, SOME, Z, adversary, worst

PARTS = ("all", "layer", "tensor", "enhanced", "optimal", "random layer")
ALL_PARTS = pytest.mark.parametrize("parts", PARTS)


def parts_of(name: str, case: Case, dtype: torch.dtype) -> Any:
    if name in ("all", "layer", "tensor"):
        return name
    known = PublicData([case.draw(6, dtype, seed=7), case.draw(6, dtype, seed=8)], loss)
    return policy(name, known, every="epoch")


def prepared(strategy: Strategy, model: nn.Module, adjacency: Adjacency, share: float, seed: int) -> Clipper:
    """A clipper with a share of the entries frozen by releases, and the noise of its next release."""
    clipper = strategy.attach(site(model, adjacency))
    clipper.secret = b"a secret"
    clipper.parts = next_parts(clipper, model, strategy)
    freeze(clipper, random_masks(model, share, seed))
    clipper.parts = next_parts(clipper, model, strategy)
    return clipper


def next_parts(clipper: Clipper, model: nn.Module, strategy: Strategy) -> Any:
    return noised_parts(clipper.bounds, trainable(model), Z, strategy.split, clipper.divisor)


def is_still(clipper: Clipper, total: dict[str, Tensor]) -> bool:
    """Whether frozen entries are exactly 0."""
    return all(not bool(total[n][mask].any()) for n, mask in clipper.frozen.items())


@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_one_example_moves_active_entries_by_at_most_the_sensitivity(case: Case) -> None:
    models = {dtype: case.build(dtype) for dtype in (torch.float32, torch.float64)}

    @FEW
    @given(
        adversaries,
        st.sampled_from(PARTS),
        st.sampled_from([0.2, 0.6, 0.95]),
        st.sampled_from(["instantiate", "vmap", "loop"]),
    )
    def run(draw: dict[str, Any], parts: str, share: float, method: str) -> None:
        draw = draw | {"place": SIZE - 1}
        mine, removed, replaced = neighbours(case, draw)
        model = models[draw["dtype"]]
        mode = "clip" if draw["seed"] % 2 else "normalize"
        strategy = PerExample(0.7, parts_of(parts, case, draw["dtype"]), mode=mode, method=method, sparse=Sparse(T))
        for adjacency, other in ((Adjacency.ZERO_OUT, removed), (Adjacency.REPLACE_ONE, replaced)):
            clipper = prepared(strategy, model, adjacency, share, draw["seed"])
            try:
                one, two = (clipped_sum(clipper, model, b) for b in (mine, other))
            except UnsupportedModelError:  # then nothing is released
                assert not ordinary(draw)
                continue
            assert worst(clipper.parts, one, two) <= SLACK
            assert is_still(clipper, one) and is_still(clipper, two)

    run()


@ALL_PARTS
@pytest.mark.parametrize("method", ["auto", "instantiate", "vmap", "loop"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_planted_adversary_reaches_the_bound(share: float, method: str, parts: str) -> None:
    """The bound covers the active entries only."""
    model = DEEP.build()
    mine, removed, replaced = adversary(DEEP)
    for adjacency, other in ((Adjacency.ZERO_OUT, removed), (Adjacency.REPLACE_ONE, replaced)):
        strategy = PerExample(0.7, parts_of(parts, DEEP, torch.float64), split="equal", method=method, sparse=Sparse(T))
        clipper = prepared(strategy, model, adjacency, share, seed=4)
        one, two = (clipped_sum(clipper, model, b) for b in (mine, other))
        assert 0.999 < worst(clipper.parts, one, two) <= SLACK
        assert is_still(clipper, one) and is_still(clipper, two)


@pytest.mark.parametrize("parts", ["all", "layer", "tensor", "optimal"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_record_reverses_a_clipped_mean_at_most(share: float, parts: str) -> None:
    """2 C_k' under zero-out: an example, and its opposite at a far larger scale."""
    model = DEEP.build()
    (x,) = DEEP.draw(1, torch.float64, seed=3)
    strategy = clipping.Batch(0.7, parts=parts_of(parts, DEEP, torch.float64), sparse=Sparse(T))
    clipper = prepared(strategy, model, Adjacency.ZERO_OUT, share, seed=4)
    alone = Batch((x,), torch.tensor([1e6]).double())
    both = Batch((torch.cat([x, x]),), torch.tensor([1e6, -1e9]).double())
    one, two = (clipped_sum(clipper, model, b) for b in (alone, both))
    assert 0.999 < worst(clipper.parts, one, two) <= SLACK
    assert is_still(clipper, one) and is_still(clipper, two)


@pytest.mark.parametrize("strategy", [PerExample(0.7, sparse=Sparse(T)), clipping.Batch(0.7, sparse=Sparse(T))],
                         ids=["per example", "batch"])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2])
def test_an_infinite_gradient_in_a_frozen_entry_hides_nothing(strategy: Strategy, size: int) -> None:
    """It counts as 0 there, and the active entries are clipped as usual."""
    model = nn.Linear(3, 1, bias=False)
    clipper = strategy.attach(site(model))
    clipper.parts = next_parts(clipper, model, strategy)
    freeze(clipper, {"weight": torch.tensor([[True, False, False]])})
    losses_B = 1e10 * model(torch.tensor([[1e30, 3.0, 4.0], [0.0, 0.0, 0.0]])).squeeze(1)
    found = clipper.clipped_sum(losses_B[:size])["weight"]
    bound = 0.7 * (2 / 3) ** 0.5
    assert torch.allclose(found, torch.tensor([[0.0, 0.6, 0.8]]) * bound, rtol=1e-5)


@pytest.mark.parametrize("kind", [PerExample, clipping.Batch])
def test_decisions_follow_from_releases_alone(kind: Any) -> None:
    """Neighbours with the same releases freeze the same entries, at the same values, with the same bounds."""
    strategy = kind(0.7, parts="layer", sparse=Sparse(T))
    batches = adversary(DEEP)
    runs = []
    for batch in batches:
        model = DEEP.build()
        runs.append((model, strategy.attach(site(model)), batch))
    random = torch.Generator().manual_seed(0)
    for _ in range(3 * T):
        sums = []
        for model, clipper, batch in runs:
            clipper.parts = next_parts(clipper, model, strategy)
            sums.append(clipped_sum(clipper, model, batch))
        _, first, _ = runs[0]
        noise = first.noise
        release = {
            n: t.double() / first.divisor + noise[n] * torch.randn(t.shape, generator=random).double()
            for n, t in sums[0].items()
        }
        for model, clipper, _ in runs:
            clipper.learn(release)
            with torch.no_grad():
                for n, p in trainable(model).items():
                    p.sub_(0.1 * release[n])
            clipper.settle()
    assert runs[0][1].frozen
    for model, clipper, _ in runs[1:]:
        assert clipper.state_dict() == runs[0][1].state_dict() and clipper.bounds == runs[0][1].bounds
        assert same(trainable(model), trainable(runs[0][0]))  # type: ignore[arg-type]


def test_a_missing_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clip with norms of active entries and sums of all entries exceeds the bound."""

    def forgetful(gradients: PerExampleGradients, *rest: Any) -> PerExampleGradients:
        masked = active_only(gradients, *rest)
        monkeypatch.setattr(masked, "weighted_sums", gradients.weighted_sums)
        return masked

    model = DEEP.build()
    mine, removed, _ = adversary(DEEP)
    clipper = prepared(PerExample(0.7, sparse=Sparse(T)), model, Adjacency.ZERO_OUT, 0.6, seed=4)
    monkeypatch.setattr(per_example, "active_only", forgetful)
    one, two = (clipped_sum(clipper, model, b) for b in (mine, removed))
    assert worst(clipper.parts, one, two) > 1.05 and not is_still(clipper, one)
