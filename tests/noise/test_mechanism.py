"""(sum + noise) / divisor, bucket by bucket: nothing is left out, nothing gets noise twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise import PerExample, make_private
from clipwise.noise import mechanism
from clipwise.noise.gaussian import buckets, gaussian, gaussian_in_pieces
from clipwise.noise.key import NoiseKey
from clipwise.noise.mechanism import fit_together, noised, noised_sums
from clipwise.privacy import Part

LIMIT = 100


@pytest.fixture(autouse=True, scope="module")
def small_buckets() -> object:
    with pytest.MonkeyPatch.context() as patched:
        for module in ("gaussian", "mechanism"):
            patched.setattr(f"clipwise.noise.{module}.BUCKET", LIMIT)
        yield


def grouped(sizes: list[int]) -> list[list[int]]:
    rest = iter(sizes)
    return [[next(rest) for _ in range(count)] for count in buckets(sizes)]


# An empty sum may stand anywhere but first: see below.
@given(sizes=st.lists(st.integers(0, 3 * LIMIT), max_size=30).filter(lambda sizes: not sizes or sizes[0] > 0))
def test_buckets_cover_all_in_order_and_only_a_large_one_exceeds_the_limit(sizes: list[int]) -> None:
    groups = grouped(sizes)
    assert [size for group in groups for size in group] == sizes
    for group in groups:
        assert group  # no draw without a sum
        assert sum(group) <= max(LIMIT, group[0])
    for group, following in itertools.pairwise(groups):
        assert sum(group) + following[0] > LIMIT  # one more would exceed the limit


def test_an_empty_sum_may_be_the_first() -> None:
    assert grouped([0, 5]) == [[0, 5]]


def test_a_large_sum_has_a_bucket_of_its_own() -> None:
    assert grouped([1, 2, 2 * LIMIT, 3, LIMIT - 3, 1]) == [[1, 2], [2 * LIMIT], [3, LIMIT - 3], [1]]


def put(noise: Tensor, onto: Tensor | None, divisor: float) -> Tensor:
    """What a draw does with a sum that is alone in its bucket."""
    return noise if onto is None else noise.add_(onto.reshape(-1)).div_(divisor)


def drawn_numbers(calls: list[tuple[int, int, torch.dtype]]) -> mechanism.Draw:
    """Bucket k's noise is 1000 (k + 1), 1000 (k + 1) + 1, ..."""

    def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
        calls.append((bucket, size, dtype))
        return put(1000 * (bucket + 1) + torch.arange(size, dtype=dtype), onto, divisor)

    return draw


SHAPES = [(3, 4), (), (7,), (150,), (2, 5, 5), (60,), (0, 3)]


@pytest.mark.parametrize("divisor", [1.0, 8.0, 7.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_number_gets_its_own_noise_once(dtype: torch.dtype, divisor: float) -> None:
    torch.manual_seed(0)
    sums = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    calls: list[tuple[int, int, torch.dtype]] = []
    found = noised([t.clone() for t in sums], drawn_numbers(calls), divisor)
    groups = grouped([t.numel() for t in sums])
    assert calls == [(k, sum(group), dtype) for k, group in enumerate(groups)]
    noise = torch.cat([1000 * (k + 1) + torch.arange(size, dtype=dtype) for k, size, _ in calls])
    expected = (torch.cat([t.flatten() for t in sums]) + noise) / divisor
    assert [t.shape for t in found] == [t.shape for t in sums]
    torch.testing.assert_close(torch.cat([t.flatten() for t in found]), expected, rtol=1e-6, atol=0)
    assert all(t.dtype == dtype for t in found)


def test_results_of_a_bucket_lie_in_the_memory_of_its_noise() -> None:
    drawn: list[Tensor] = []

    def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
        drawn.append(torch.zeros(size, dtype=dtype))
        return put(drawn[-1], onto, divisor)

    first, second, third = noised([torch.ones(10), torch.ones(5), torch.ones(90)], draw, 2.0)
    assert len(drawn) == 2
    assert first.data_ptr() == drawn[0].data_ptr() and third.data_ptr() == drawn[1].data_ptr()
    assert second.data_ptr() == drawn[0].data_ptr() + 10 * 4
    assert torch.equal(torch.cat([first, second, third]), torch.full((105,), 0.5))


def test_one_sum_in_float64_is_noised_in_float64_and_none_below_float32() -> None:
    dtypes: list[torch.dtype] = []

    def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
        dtypes.append(dtype)
        return put(torch.full((size,), 1e-9, dtype=dtype), onto, divisor)

    wide = noised([torch.ones(2), torch.ones(3, dtype=torch.float64)], draw, 1.0)
    narrow = noised([torch.ones(2, dtype=torch.bfloat16)], draw, 1.0)
    assert dtypes == [torch.float64, torch.float32]
    assert all(torch.equal(t, torch.full_like(t, 1 + 1e-9)) for t in wide)
    assert narrow[0].dtype == torch.float32


def test_sums_are_taken_out_of_the_list_early() -> None:
    """So that a large model's sums do not stay beside their noised copies."""
    sums = [torch.ones(LIMIT) for _ in range(4)]
    left: list[int] = []

    def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
        left.append(len(sums))
        return put(torch.zeros(size, dtype=dtype), onto, divisor)

    assert len(noised(sums, draw, 1.0)) == 4
    assert left == [3, 2, 1, 0] and sums == []


def test_what_is_released_has_no_history() -> None:
    sums = [torch.ones(3, requires_grad=True) * 2]
    (found,) = noised(sums, drawn_numbers([]), 1.0)
    assert not found.requires_grad and found.grad_fn is None


def test_only_a_sum_that_is_alone_and_dense_is_given_to_the_draw() -> None:
    given: list[bool] = []

    def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
        given.append(onto is not None)
        return put(torch.zeros(size, dtype=dtype), onto, divisor)

    wide, turned = torch.ones(LIMIT, dtype=torch.float64), torch.ones(10, LIMIT // 10).t()
    noised([torch.ones(LIMIT), torch.ones(2), torch.ones(3), turned, torch.ones(LIMIT, 2)[:, 0]], draw, 2.0)
    assert given == [True, False, True, False]
    given.clear()
    halves = noised([torch.ones(LIMIT), wide], draw, 2.0)
    assert given == [False, True]  # the first is not in the type of the noise
    assert all((t == 0.5).all() for t in halves)


@given(
    shapes=st.lists(
        st.lists(st.sampled_from([(), (1,), (3,), (2, 5), (0,)]), min_size=1, max_size=3), min_size=2, max_size=4
    )
)
def test_parts_noised_together_get_each_its_own_piece_of_one_draw(shapes: list[list[tuple[int, ...]]]) -> None:
    parts, sums, expected = [], {}, []
    for k, some in enumerate(shapes):
        names = tuple(f"{k}/{i}" for i in range(len(some)))
        sums |= {name: torch.randn(shape) for name, shape in zip(names, some, strict=True)}
        parts.append(Part(f"part {k}", names, 1.0, 0.5 + k))
        expected += [0.5 + k] * len(some)
    assert fit_together(parts, sums)
    key = NoiseKey.from_seed(1)
    noise = gaussian_in_pieces(key.derive(mechanism.TOGETHER), [t.numel() for t in sums.values()], expected)
    before = {name: total.clone() for name, total in sums.items()}
    found = noised_sums(sums, parts, 3.0, key)
    assert list(found) == list(before)
    for (name, total), piece in zip(before.items(), noise.split([t.numel() for t in before.values()]), strict=True):
        assert torch.equal(found[name], (total + piece.view_as(total)) / 3.0)


DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtypes", [DTYPES[:1], DTYPES[1:], DTYPES, (torch.bfloat16,)])
def test_in_place_or_not_every_part_gets_the_noise_of_its_label(dtypes: tuple[torch.dtype, ...]) -> None:
    """The second part is larger than a bucket. Mixed or narrow types take one draw for each bucket."""
    torch.manual_seed(0)
    shapes = {"a": (3, 4), "b": (7,), "c": (LIMIT - 10, 2), "d": (30,)}
    sums = {name: torch.randn(shape).to(dtypes[k % len(dtypes)]) for k, (name, shape) in enumerate(shapes.items())}
    sums["c"] = sums["c"].t().contiguous().t()
    parts = [Part("first", ("a", "b"), 1.0, 2.0), Part("second", ("c", "d"), 1.0, 0.5)]
    key, before, memory = NoiseKey.from_seed(1), {n: t.clone() for n, t in sums.items()}, dict(sums)
    found = noised_sums(sums, parts, 3.0, key)
    for number, bucket, std, names in ((0, 0, 2.0, "ab"), (1, 0, 0.5, "c"), (1, 1, 0.5, "d")):
        wide = torch.float64 if any(before[n].dtype == torch.float64 for n in parts[number].parameters) else None
        sizes = [before[name].numel() for name in names]
        drawn = gaussian(key.derive(mechanism.noise_label(number, 0, bucket)), sum(sizes), std, dtype=torch.float64)
        for name, noise in zip(names, drawn.split(sizes), strict=True):
            dtype = wide or torch.float32
            noise = noise.view(before[name].t().shape).t() if name == "c" else noise.view_as(before[name])
            assert torch.equal(found[name], (before[name].to(dtype) + noise.to(dtype)) / 3.0)
            is_in_place = len(dtypes) == 1 and dtypes[0] != torch.bfloat16
            assert (found[name].data_ptr() == memory[name].data_ptr()) == is_in_place


def test_parts_without_noise_scaled_or_of_other_types_are_noised_one_by_one() -> None:
    sums = {"a": torch.zeros(3), "b": torch.zeros(2)}
    one, two = Part("a", ("a",), 1.0, 1.0), Part("b", ("b",), 1.0, 1.0)
    assert fit_together([one, two], sums)
    assert not fit_together([one], {"a": sums["a"]})
    assert not fit_together([one, Part("b", ("b",), 1.0, 0.0)], sums)
    assert not fit_together([one, Part("b", ("b",), 1.0, 1.0, (2.0,))], sums)
    assert not fit_together([one, two], sums | {"b": torch.zeros(2).double()})
    assert not fit_together([one, two], sums | {"b": torch.zeros(LIMIT)})


@pytest.mark.parametrize("alone", [False, True])
def test_noise_falls_in_the_order_of_memory(alone: bool) -> None:
    """So a model in channels last is noised without a copy, and every number still gets noise of its own."""
    total = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    sums = [total] if alone else [torch.randn(1, 5).t(), total, torch.randn(6, 2)[:, 0], torch.randn(3, 1, 1)]
    sizes = [t.numel() for t in sums]
    found = noised(list(sums), drawn_numbers([]), 1.0)
    pieces = (1000 + torch.arange(sum(sizes))).split(sizes)
    for t, noised_sum, numbers in zip(sums, found, pieces, strict=True):
        noise = (noised_sum - t).round()
        assert torch.equal(noise.flatten().sort().values, numbers.float())
        assert mechanism._order(noised_sum) == mechanism._order(t)
    mine = found[sums.index(total)] - total if alone else found[1] - total
    assert torch.equal(mine.round().permute(0, 2, 3, 1).flatten(), pieces[-1 if alone else 1].float())


def test_a_sum_is_brought_into_the_order_of_its_parameter() -> None:
    parameter = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    total = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    found = mechanism.in_order_of(parameter, total)
    assert found.stride() == parameter.stride() and found.dtype == torch.float64 and torch.equal(found, total)
    assert mechanism.in_order_of(total, total) is total
    spread = torch.zeros(1, 1).expand(5, 2)
    assert mechanism.in_order_of(torch.randn(5, 2), spread).is_contiguous()


def test_a_sum_in_the_middle_of_memory_is_noised_where_it_is() -> None:
    sums = [torch.arange(2.0 * LIMIT)[LIMIT:]]
    (found,) = noised(list(sums), drawn_numbers([]), 1.0)
    assert torch.equal(found - sums[0], 1000 + torch.arange(float(LIMIT)))


def test_axes_of_size_1_do_not_make_another_order() -> None:
    parameter = torch.randn(4, 3, 1, 1)
    total = torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last)
    total = total.as_strided(total.shape, (3, 1, 3, 3))
    found = mechanism.in_order_of(parameter, total)
    assert found.stride() == parameter.stride() and found.data_ptr() == total.data_ptr()
    assert torch.equal(found, total)


def test_how_sums_lie_in_memory_does_not_change_where_noise_falls() -> None:
    """It depends on the parameter alone: some ways to compute a sum return it transposed."""
    found = []
    for turns in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            clipping=PerExample(1.0),
            sampling="full",
            noise_multiplier=1.0,
            seed=3,
        )
        clipped_sum = private._context.clipper.clipped_sum

        def turned(losses: Tensor, clipped_sum: Any = clipped_sum, turns: bool = turns) -> dict[str, Tensor]:
            sums = clipped_sum(losses)
            sums["weight"] = sums["weight"].t().contiguous().t() if turns else sums["weight"].contiguous()
            return sums

        private._context.clipper.clipped_sum = turned  # type: ignore[method-assign]
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x), y, reduction="none"))
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_lies_as_its_parameter(dtype: torch.dtype) -> None:
    parameter = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    parameter = parameter.to(dtype)
    found = mechanism.laid_as(parameter, gradient := torch.randn(4, 3, 2, 2))
    assert found.stride() == parameter.stride() and found.dtype == dtype
    assert torch.equal(found, gradient.to(dtype))
    assert mechanism.laid_as(gradient, gradient) is gradient


@pytest.mark.parametrize("fused", [torch.optim.SGD, torch.optim.Adam])
def test_fused_optimizers_take_models_in_channels_last(fused: type[torch.optim.Optimizer]) -> None:
    """They walk through the memory of parameters and gradients side by side."""
    found = []
    for options in ({}, {"fused": True}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 3))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        data = TensorDataset(torch.randn(6, 3, 6, 6), torch.arange(6) % 3)
        optimizer = fused(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        private = make_private(model, optimizer, data, clipping=PerExample(1.0), sampling="full", noise_multiplier=0)
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x), y, reduction="none"))
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_noise_is_put_onto_the_scaled_sum_and_then_the_scale_is_taken_off() -> None:
    """(m s + noise) / (m d): the noise is for the sensitivity of the scaled sum."""
    sums = [torch.full((3,), 2.0), torch.full((2 * LIMIT,), 5.0), torch.full((4,), -1.0)]
    scales = [4.0, 0.5, 8.0]
    found = noised(list(sums), lambda bucket, size, dtype, onto, d: put(torch.ones(size), onto, d), 10.0, scales)
    for value, m, result in zip((2.0, 5.0, -1.0), scales, found, strict=True):
        torch.testing.assert_close(result, torch.full_like(result, (m * value + 1) / (m * 10)))
