"""Normalization layers do not mix examples, and keep only released values.

The published scheme, with statistics of private and public rows together, is here as a fixture
only: one record moves every clipped gradient, and each of the tests catches it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import PerExample, check, make_private
from clipwise.errors import CoupledExamplesError, UnsupportedModelError
from clipwise.gradients import METHODS
from clipwise.layers.public_statistics import PublicStatistics
from clipwise.privacy import Adjacency
from clipwise.validation.coupling import IndependenceProbe
from clipwise.validation.inventory import ModelState
from clipwise.validation.step_guard import BufferGuard
from tests.layers.normalized import SOUND, images, labels, losses_of, network, public, sound
from tests.soundness.neighbours import DISTORTIONS, FACTORS, Batch, attach, clipped_sum, excess
from tests.soundness.published_normalization import moved_by_an_outlier, moved_by_kind, published

SLACK, SIZE = 1 + 1e-5, 5
BY_KIND = pytest.mark.parametrize("kind", SOUND)

adversaries = st.fixed_dictionaries(
    {
        "distortion": st.sampled_from(sorted(DISTORTIONS)),
        "factor": st.sampled_from(FACTORS),
        "place": st.integers(0, SIZE - 1),
        "seed": st.integers(0, 99),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "method": st.sampled_from(METHODS),
    }
)


# ------------------------------------------------------------------ bounded


@BY_KIND
def test_one_example_moves_the_sum_by_at_most_the_sensitivity(kind: str) -> None:
    models = {dtype: sound(kind, dtype)[0] for dtype in (torch.float32, torch.float64)}
    clippers = {(m, t): attach(model, PerExample(0.7, method=m)) for t, model in models.items() for m in METHODS}

    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(adversaries)
    def run(draw: dict[str, object]) -> None:
        dtype, place = draw["dtype"], draw["place"]
        plain = Batch((images(SIZE, dtype, draw["seed"]),), torch.ones(SIZE, dtype=dtype))
        spoiled = plain.distorted(place, draw["distortion"], draw["factor"])
        clipper, model = clippers[draw["method"], dtype], models[dtype]
        try:
            mine, removed, replaced = (clipped_sum(clipper, model, b) for b in (spoiled, spoiled.without(place), plain))
        except UnsupportedModelError:  # then nothing is released; ordinary batches must be accepted
            assert draw["distortion"] not in ("none", "outlier", "zero") or draw["factor"] not in (1.0, -1.0, 1e6)
            return
        assert excess(clipper, mine, removed, Adjacency.ZERO_OUT) <= SLACK
        assert excess(clipper, mine, replaced, Adjacency.REPLACE_ONE) <= SLACK

    run()


@pytest.mark.parametrize("kind", ["public", "public-exact", "self+public"])
def test_public_statistics_do_not_depend_on_private_rows(kind: str) -> None:
    """The public branch has public statistics only: buffers do not depend on the batch."""
    (model, statistics), (other, _) = sound(kind), sound(kind)
    model(1e6 * images(7))
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
        statistics.refresh(force=True)


# ------------------------------------------------- the scheme that was published


@pytest.mark.parametrize(("size", "rows"), [(16, 16), (64, 128)])
def test_the_published_scheme_is_not_bounded(size: int, rows: int) -> None:
    """One outlier moves nearly every gradient: by a fraction of the batch size, while the noise is for 1."""
    assert moved_by_an_outlier(published, size, rows) > size / 4
    for kind in SOUND:
        assert moved_by_kind(kind, size, rows) <= SLACK


def test_the_probe_catches_the_published_scheme() -> None:
    model, probe = published(network(), public()), IndependenceProbe()
    x, y = probe.mark((images(4), labels(4)))
    with pytest.raises(CoupledExamplesError, match="depends on the inputs of another"):
        probe.examine(losses_of(model, x, y))


def test_the_engine_and_check_refuse_the_published_scheme() -> None:
    model = published(network(torch.float32), public(torch.float32))
    x, y = images(40, torch.float32), labels(40)
    assert not check(model, losses_of, (x[:4], y[:4])).ok
    private = make_private(
        model, torch.optim.SGD(model.parameters(), 0.1), TensorDataset(x, y), batch_size=20, noise_multiplier=1.0
    )
    with pytest.raises(CoupledExamplesError):
        private.step(losses_of(model, *next(iter(private.loader))))


@BY_KIND
def test_check_accepts_the_sound_kinds(kind: str) -> None:
    report = check(sound(kind, torch.float32)[0], losses_of, (images(4, torch.float32), labels(4)))
    assert report.ok, report
    assert not report.notes  # every operation has a rule


# --------------------------------------------------------------- private training


def releases(
    model: nn.Module, statistics: PublicStatistics, dataset: TensorDataset, steps: int, replayed: Iterator[list[Tensor]]
) -> Iterator[list[Tensor]]:
    """A private run with its own releases, or with those of another run."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    private = make_private(model, optimizer, dataset, batch_size=8, noise_multiplier=1.0, seed=3)
    done = 0
    while done < steps:
        for x, y in private.loader:
            private.backward(losses_of(model, x, y))
            parameters = list(model.parameters())
            release = next(replayed, [p.grad for p in parameters])
            for p, gradient in zip(parameters, release, strict=True):
                p.grad = gradient
            private._context.weights.released.remember()  # as its own release
            optimizer.step()
            optimizer.zero_grad()
            statistics.refresh()
            done += 1
            yield [g.clone() for g in release]
            if done == steps:
                break


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in copy.deepcopy(model.state_dict()).items()}


def not_from_releases(build: Callable[[], tuple[nn.Module, PublicStatistics]]) -> set[str]:
    """Return the state that does not follow from releases: where a neighbour that replays them differs.

    Compared bit by bit, after each step.
    """
    x, y = images(24, torch.float32), labels(24)
    spoiled = x.clone()
    spoiled[:8] = 1e4
    (model, statistics), (other, its) = build(), build()
    first = []
    for release in releases(model, statistics, TensorDataset(x, y), 6, iter(())):
        first.append((release, buffers_of(model)))
    replay = iter([release for release, _ in first])
    differ: set[str] = set()
    for step, _ in enumerate(releases(other, its, TensorDataset(spoiled, y), 6, replay)):
        expected, found = first[step][1], buffers_of(other)
        assert set(found) == set(expected)
        differ |= {name for name in expected if not torch.equal(found[name], expected[name])}
    assert model.state_dict()["0.weight"].isfinite().all()
    return differ


@BY_KIND
def test_whatever_is_saved_follows_from_what_was_released(kind: str) -> None:
    assert not not_from_releases(lambda: sound(kind, torch.float32))


class Learning(nn.Module):
    """Keeps a running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.data.lerp_(x.detach().mean(), 0.1)
        return x


def learning() -> tuple[nn.Module, PublicStatistics]:
    model, statistics = sound("group", torch.float32)
    model.append(Learning())
    return model, statistics


def test_running_statistics_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine; and without its check, by the comparison above."""
    with pytest.raises(UnsupportedModelError, match="seen"):
        not_from_releases(learning)
    monkeypatch.setattr(BufferGuard, "compare_listed", lambda self: None)
    monkeypatch.setattr(ModelState, "changed", lambda self, *_, **__: [])
    assert not_from_releases(learning) == {"11.seen"}


@BY_KIND
def test_pieces_of_a_batch_have_the_same_statistics(kind: str) -> None:
    """The release does not depend on how a batch is cut."""
    found = []
    for most in (None, 3):
        model, _ = sound(kind)
        data = TensorDataset(images(24), labels(24))
        private = make_private(
            model, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=12, noise_multiplier=1.0, seed=1,
            max_physical_batch_size=most,
        )  # fmt: skip
        for batch in private.loader.pieces():
            if private.backward(losses_of(model, *batch)):
                break
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-9)
