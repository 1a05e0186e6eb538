"""Views are draws of one example alone, and averaging them before the clip keeps the sensitivity."""

import copy
from collections import UserDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise
from clipwise import PerExample
from clipwise.errors import ConfigurationError, CoupledExamplesError, StepError
from clipwise.sampling import augmentation
from clipwise.sampling.augmentation import Crop, Flip, Views
from clipwise.sampling.generators import generator_from
from experiments import models
from tests.sites import site
from tests.soundness.neighbours import distance

C, K = 0.3, 3


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count, side=8, channels=1, seed=0):
    return torch.rand(count, channels, side, side, generator=random(seed), dtype=torch.float64)


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 3), st.integers(0, 1000))
def test_a_crop_is_a_window_of_the_padded_image(count, padding, channels, seed):
    x = images(count, side=6, channels=channels, seed=seed) + 1
    size = 6 if padding < 2 else 8
    size = min(size, 6 + 2 * padding)
    found = Crop(size, padding)(x, random(seed))
    assert found.shape == (count, channels, size, size)
    padded = F.pad(x, [padding] * 4)
    places = range(6 + 2 * padding - size + 1)
    for row, whole in zip(found, padded, strict=True):
        windows = [whole[:, i : i + size, j : j + size] for i in places for j in places]
        assert any(torch.equal(row, window) for window in windows)


def test_every_place_is_drawn_about_equally_often():
    one_hot = torch.zeros(1, 1, 4, 4)
    one_hot[0, 0, 1, 1] = 1
    found = Crop(4, padding=1)(one_hot.expand(9000, -1, -1, -1), random())
    counts = found.sum(0)[0]
    assert counts[3].sum() == 0 and (counts[:3, :3] - 1000).abs().max() < 150


def test_rows_are_drawn_on_their_own():
    x = images(1, side=8).expand(64, -1, -1, -1)
    assert len({row.numpy().tobytes() for row in Crop(8, 4)(x, random())}) > 20
    flipped = (Flip()(x, random()) != x).flatten(1).any(1)
    assert 10 < flipped.sum() < 54
    assert torch.equal(Flip()(x, random())[flipped][0], x[0].flip(2))


def test_a_generator_repeats_and_none_does_not():
    x = images(8)
    assert torch.equal(Views(2, Crop(8)).of(x, random(1)), Views(2, Crop(8)).of(x, random(1)))
    torch.manual_seed(0)
    first = Views(2, Crop(8)).of(x)
    torch.manual_seed(0)
    assert not torch.equal(first, Views(2, Crop(8)).of(x)), "a published seed may not decide the draws"


def test_views_of_an_example_lie_together():
    x, y = torch.arange(3.0).view(3, 1, 1, 1), torch.arange(3)
    views = Views(2)
    assert views.of(x).flatten().tolist() == [0, 0, 1, 1, 2, 2] and views.labels(y).tolist() == [0, 0, 1, 1, 2, 2]
    assert views.mean(torch.tensor([1.0, 3, 5, 7, 0, 1])).tolist() == [2, 6, 0.5]


def test_an_empty_batch_has_no_losses():
    views = Views(K, Crop(8, 2), Flip())
    assert views.of(images(0)).shape == (0, 1, 8, 8)
    assert views.mean(torch.zeros(0)).shape == (0,)


def test_wrong_arguments_are_named():
    for wrong in (0, 2.0, True):
        with pytest.raises(clipwise.ConfigurationError, match="whole number"):
            Views(wrong)
    with pytest.raises(clipwise.ConfigurationError, match="3 losses for each example"):
        Views(3).mean(torch.zeros(4))
    with pytest.raises(clipwise.ConfigurationError, match="reduction='none'"):
        Views(3).mean(torch.zeros(()))
    with pytest.raises(clipwise.ConfigurationError, match="larger than the padded image: take"):
        Crop(12, padding=1)(images(1), random())
    for draw in (Crop(2), Flip()):
        with pytest.raises(clipwise.ConfigurationError, match=r"images of shape \[B, C, H, W\].*2 dimensions"):
            draw(torch.zeros(3, 4), random())


# --------------------------------------------------------------------- the clip


def model_of(norm="group"):
    torch.manual_seed(0)
    return models.convnet(norm=norm, image_channels=1).double()


def losses_of(model, rows, labels, views):
    return views.mean(F.cross_entropy(model(rows), labels, reduction="none"))


def averaged_gradients(model, rows, labels):
    """Of each example: K forward passes of their own, averaged, then clipped to C."""
    model = copy.deepcopy(model)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(0, len(rows), K):
        mean = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for k in range(i, i + K):
            loss = F.cross_entropy(model(rows[k : k + 1]), labels[k : k + 1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for (name, entry), grad in zip(mean.items(), grads, strict=True):
                mean[name] = entry + grad / K
        norm = torch.cat([g.flatten() for g in mean.values()]).norm()
        for name in total:
            total[name] += mean[name] * min(1.0, C / float(norm))
    return total


@pytest.mark.parametrize("method", ["auto", "bookkeeping", "reweight", "loop"])
@pytest.mark.parametrize("norm", ["group", "none"])
def test_the_sum_is_that_of_clipped_averages(norm, method):
    model, views = model_of(norm), Views(K, Crop(8, 2), Flip())
    rows, labels = views.of(images(4), random()), views.labels(torch.arange(4))
    clipper = PerExample(C, method=method).attach(site(model))
    found = clipper.clipped_sum(losses_of(model, rows, labels, views))
    expected = averaged_gradients(model, rows, labels)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_a_neighbour_moves_it_by_at_most_c_and_reaches_it(scale):
    """The last example is taken out, with all of its views; the others keep their draws."""
    model, views = model_of(), Views(K, Crop(8, 2), Flip())
    rows, labels = views.of(images(4), random()), views.labels(torch.arange(4))
    weights = torch.ones(4, dtype=torch.float64)
    weights[-1] = scale
    clipper = PerExample(C).attach(site(model))
    whole = clipper.clipped_sum(losses_of(model, rows, labels, views) * weights)
    without = clipper.clipped_sum(losses_of(model, rows[:-K], labels[:-K], views))
    moved = distance(whole, without)
    assert moved <= C * (1 + 1e-9)
    assert scale == 1 or moved > C * (1 - 1e-6)


def test_one_bound_a_view_would_be_k_times_as_far():
    """What averaging after the clip would do: the test above can fail."""
    model = model_of()
    rows, labels = images(1).repeat_interleave(K, 0), torch.zeros(K, dtype=torch.long)
    clipper = PerExample(C).attach(site(model))
    apart = clipper.clipped_sum(1e3 * F.cross_entropy(model(rows), labels, reduction="none"))
    assert distance(apart, {name: torch.zeros_like(v) for name, v in apart.items()}) > 2.9 * C


@pytest.mark.slow
def test_a_private_run_with_views():
    model, views = model_of().float(), augmentation.Views(2, Crop(8, 2), Flip())
    data = TensorDataset(images(40).float(), torch.arange(40) % 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipwise.make_private(model, optimizer, data, sample_rate=0.02, noise_multiplier=1.0)
    steps = 0
    for x, y in private.loader:  # some batches are empty
        steps += private.step(losses_of(model, views.of(x), views.labels(y), views))
    assert steps == private.steps == 50


# ------------------------------------------------------------------- the engine


def run_with(views: int | Views, **options):
    model = model_of().float()
    data = TensorDataset(images(40).float(), torch.arange(40) % 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = "augmentation" if isinstance(views, Views) else "augmentation_multiplicity"
    settings = {"sample_rate": 0.1, "noise_multiplier": 0.0, "seed": 5, name: views} | options
    return model, clipwise.make_private(model, optimizer, data, **settings)


def plain_losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def test_the_engine_yields_rows_and_takes_their_mean():
    model, private = run_with(Views(3, Crop(8, 2), Flip()))
    assert private.views == 3
    for x, y in private.loader:
        assert len(x) == len(y) and len(x) % 3 == 0 and (y.view(-1, 3) == y.view(-1, 3)[:, :1]).all()
        rows, labels = x.detach(), y.clone()
        private.step(plain_losses(model, x, y))
        break
    assert private.steps == 1 and len(rows) == len(labels)


@pytest.mark.parametrize("most", [None, 2])
def test_rows_that_are_alike_change_nothing(most):
    """K times the same row is that row: the run is that of the engine without views, however batches are cut."""
    found = []
    for K in (1, 4):
        model, private = run_with(K, max_physical_batch_size=most)
        for batch in private.loader.pieces():
            private.step(plain_losses(model, *batch))
            if private.steps == 3:
                break
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_losses_of_examples_are_not_those_of_rows():
    model, private = run_with(2, sample_rate=0.9)
    x, y = next(iter(private.loader))
    with pytest.raises(StepError, match="2 rows per example"):
        private.step(plain_losses(model, x, y)[::2])


def test_coupled_views_are_still_found():
    model, private = run_with(2, sample_rate=0.9)
    x, y = next(iter(private.loader))
    with pytest.raises(CoupledExamplesError):
        private.step(plain_losses(model, x - x.mean(0), y))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8", 10**30])
def test_a_wrong_number_of_views_is_named(wrong):
    with pytest.raises(ConfigurationError, match="augmentation_multiplicity"):
        run_with(wrong)


@pytest.mark.parametrize(
    "wrong", [{"augmentation": 2}, {"augmentation": Views(2), "augmentation_multiplicity": 2}], ids=["number", "both"]
)
def test_views_are_given_once(wrong):
    with pytest.raises(ConfigurationError, match=r"augmentation.*augmentation_multiplicity"):
        run_with(1, **wrong)


@pytest.mark.slow
def test_a_compiled_step_takes_views_too():
    model, private = run_with(2)
    step = private.compiled(lambda x, y: plain_losses(model, x, y))
    for batch in private.loader:
        step(*batch)
    assert private.steps == private._context.scheme.steps_per_epoch


def test_views_of_a_mapping_change_its_inputs_and_repeat_the_rest():
    x, y = images(3), torch.arange(3)
    for kind in (dict, UserDict):
        batch = kind({"labels": y, "size": torch.tensor(8), "pixels": x})
        found = Views(2, Crop(8, 2)).of_batch(batch, generator_from(bytes(32)))
        assert type(found) is kind and list(found) == ["labels", "size", "pixels"]
        assert torch.equal(found["pixels"], Views(2, Crop(8, 2)).of(x, generator_from(bytes(32))))
        assert found["labels"].tolist() == [0, 0, 1, 1, 2, 2] and found["size"].item() == 8
    rows = torch.randn(3, 5)
    negated = Views(2, lambda rows, random: -rows).of_batch({"ids": y, "row": rows})
    assert torch.equal(negated["row"], -rows.repeat_interleave(2, 0))


def test_views_of_a_named_tuple_keep_its_names():
    found = Views(2, Flip()).of_batch(namedtuple("Pair", "x y")(images(2), torch.arange(2)))
    assert found._fields == ("x", "y") and len(found.x) == len(found.y) == 4


def test_a_mapping_whose_inputs_are_not_clear_is_refused_with_random_changes():
    for batch, words in (
        ({"image": images(2), "mask": images(2)}, "each of 'image', 'mask'"),
        ({"labels": torch.arange(2)}, "no tensor"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            Views(2, Flip()).of_batch(batch)
        assert all(len(rows) == 4 for rows in Views(2).of_batch(batch).values())


def test_views_that_are_alike_have_the_same_draws_in_every_batch():
    alike = Views(2, Crop(8, 2), Flip()).alike()
    x = images(5)
    found = alike.of(x).view(5, 2, *x.shape[1:])
    assert torch.equal(alike.of(x[3:4]), found[3]) and torch.equal(alike.of(x.flip(0))[:2], found[4])


def views_of_the_first_batch(**options):
    _, private = run_with(Views(2, Crop(8, 4), Flip()), **{"sample_rate": 0.9} | options)
    return next(iter(private.loader))[0].detach(), private


def test_views_come_from_the_run_s_key():
    """A seeded run is reproducible, whatever the state of torch's own generator."""
    torch.manual_seed(0)
    first, private = views_of_the_first_batch(seed=5)
    torch.manual_seed(1)
    assert torch.equal(first, views_of_the_first_batch(seed=5)[0])
    assert torch.equal(first, next(iter(private.loader))[0].detach()), "handed out again, it has the same views"
    model = private._context.model
    private.step(plain_losses(model, *next(iter(private.loader))))
    second = next(iter(private.loader))[0].detach()
    assert first.shape != second.shape or not torch.equal(first, second)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(views_of_the_first_batch(seed=None, sampling="full", sample_rate=None)[0])
    assert not torch.equal(*found), "a published seed may not decide the draws"


def test_pieces_of_a_batch_have_views_of_their_own():
    x = images(1).expand(12, -1, -1, -1).float()
    model = model_of().float()
    private = clipwise.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TensorDataset(x, torch.arange(12) % 10),
        augmentation=Views(4, Crop(8, 4)),
        sampling="full",
        noise_multiplier=0.0,
        max_physical_batch_size=4,
        seed=5,
    )
    seen = []
    for batch in private.loader.pieces():
        seen.append(batch[0].detach())
        private.step(plain_losses(model, *batch))
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_a_run_with_views_continues_bit_for_bit(tmp_path):
    def go(private, model, steps):
        for _ in range(steps):
            private.step(plain_losses(model, *next(iter(private.loader))))

    found = []
    for stops in (False, True):
        options = {"noise_multiplier": 1.0, "resume_file": tmp_path / "secrets"}
        model, private = run_with(Views(2, Crop(8, 4), Flip()), **options)
        go(private, model, 2)
        if stops:
            state, weights = private.state_dict(), copy.deepcopy(model.state_dict())
            private.close()
            model, private = run_with(Views(2, Crop(8, 4), Flip()), **options | {"seed": None})
            model.load_state_dict(weights)
            private.load_state_dict(state)
        go(private, model, 2)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("draw", [Flip, Crop, 3, None])
def test_what_is_no_function_of_rows_is_refused(draw: object) -> None:
    with pytest.raises(ConfigurationError, match=r"Views: .* give Crop\(32\) or Flip\(\), an object"):
        Views(2, draw)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [("a",), (0,), (8, -1), (8, 1.5)])
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[object, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"Crop: (size|padding)"):
        Crop(*sizes)  # type: ignore[arg-type]
