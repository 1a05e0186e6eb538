"""Properties of every clipped layer: function, unclipped gradient, bound and sum over the batch."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from clipwise.errors import ConfigurationError
from clipwise.layers import ClippedLayer, clip_inputs
from clipwise.layers.clipped import linear_map, unclipped
from clipwise.layers.clipped.layer import lengths
from clipwise.layers.clipped.linear import Convolution, Matrix
from clipwise.layers.clipped.normalization import lookup_norm
from tests.layers.clipped.cases import CASES, EXAMPLES, bounds, clipped, inputs

every_case = pytest.mark.parametrize("name", CASES)
every_way = pytest.mark.parametrize(
    ("mode", "bound"),
    [("clip", "upstream"), ("clip", "gradient"), ("normalize", "upstream"), ("normalize", "gradient")],
)


def gradients(model: nn.Module, y: Tensor, g: Tensor, *more: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, [*model.parameters(), *more], g))


def upstream(y: Tensor, scale: float = 1.0, seed: int = 7) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return scale * torch.randn(y.shape, generator=random, dtype=torch.float64)


def one(x: Tensor, i: int, axis: int) -> Tensor:
    return x.narrow(axis, i, 1)


@every_case
@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_evaluation_and_training_compute_the_same(name: str, scale: float) -> None:
    case = CASES[name]
    model, x = clipped(case), inputs(case, scale=scale)
    with torch.no_grad():
        still = model(x)
    assert model(x).requires_grad
    torch.testing.assert_close(model(x), still, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(copy.deepcopy(model).eval()(x), still, rtol=1e-9, atol=1e-12)


@every_case
@pytest.mark.parametrize("scale", [0.1, 5.0])
@pytest.mark.parametrize("bound", ["upstream", "gradient"])
def test_without_clips_of_gradients_the_gradient_is_the_derivative(
    name: str, scale: float, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    model, x = clipped(case, bound=bound), inputs(case, scale=scale)
    with_x = [] if case.ids else [x.requires_grad_()]
    y = model(x)
    g = upstream(y)
    with unclipped():
        found = gradients(model, y, g, *with_x)
    import clipwise.layers.clipped as package

    for part in ("attention", "layer", "recurrent"):
        # The evaluation path uses plain operations, which torch can differentiate.
        monkeypatch.setattr(f"{package.__name__}.{part}.is_plain", lambda: True)
    expected = gradients(model, model(x), g, *with_x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@every_case
@every_way
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.floats(-4, 6), st.floats(-4, 6), st.integers(0, 10_000))
def test_no_example_adds_more_than_its_bound(
    name: str, mode: str, bound: str, input_size: float, gradient_size: float, seed: int
) -> None:
    case = CASES[name]
    model = clipped(case, seed, mode=mode, bound=bound)
    x = inputs(case, 1, 10**input_size, seed)
    y = model(x)
    found = gradients(model, y, upstream(y, 10**gradient_size, seed))
    for (parameter, most), gradient in zip(bounds(model).items(), found, strict=True):
        assert float(gradient.norm()) <= most, parameter


@every_case
@every_way
def test_a_batch_may_be_empty(name: str, mode: str, bound: str) -> None:
    case = CASES[name]
    model = clipped(case, mode=mode, bound=bound)
    assert model(inputs(case, 0)).shape == (0, *model(inputs(case)).shape[1:])


@every_case
@every_way
def test_a_batch_is_the_sum_of_its_examples(name: str, mode: str, bound: str) -> None:
    case = CASES[name]
    model, x = clipped(case, mode=mode, bound=bound), inputs(case, scale=3.0)
    y = model(x)
    g = upstream(y, 3.0)
    together = gradients(model, y, g)
    each = [gradients(model, model(one(x, i, case.axis)), g[i : i + 1]) for i in range(EXAMPLES)]
    for k, whole in enumerate(together):
        torch.testing.assert_close(whole, sum(found[k] for found in each), rtol=1e-9, atol=1e-10)


@every_case
@every_way
def test_a_non_finite_example_affects_no_other(name: str, mode: str, bound: str) -> None:
    case = CASES[name]
    model, x = clipped(case, mode=mode, bound=bound), inputs(case, scale=3.0)
    y = model(x)
    g = upstream(y, 3.0)
    bad_g = g.clone()
    bad_g[1].view(-1)[0] = math.inf
    rest = [0, 2, 3]
    expected = gradients(model, model(x.index_select(case.axis, torch.tensor(rest))), g[rest])
    for (parameter, most), a, b in zip(bounds(model).items(), gradients(model, model(x), bad_g), expected, strict=True):
        assert float((a - b).norm()) <= most, parameter  # false for NaN
        if "both ways" not in name:  # the other direction of that example is finite and counts
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    if case.ids:
        return
    bad_x = x.clone()
    one(bad_x, 1, case.axis)[(0,) * x.dim()] = math.nan
    y = model(bad_x)
    torch.testing.assert_close(y[rest], model(x)[rest])
    with_bad = gradients(model, y, g)
    assert all(bool(torch.isfinite(t).all()) for t in with_bad)
    without = gradients(model, model(x.index_select(case.axis, torch.tensor(rest))), g[rest])
    for (parameter, most), a, b in zip(bounds(model).items(), with_bad, without, strict=True):
        assert float((a - b).norm()) <= most, parameter


@every_case
def test_normalize_ignores_the_scale_of_a_gradient(name: str) -> None:
    case = CASES[name]
    model, x = clipped(case, mode="normalize"), inputs(case)
    y = model(x)
    g = upstream(y)
    before = gradients(model, y, g)
    for scale in (2.0**-8, 2.0**8):
        after = gradients(model, model(x), g * scale)
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    nothing = gradients(model, model(x), g * 0)
    assert not any(bool(t.any()) for t in nothing)


@every_case
@pytest.mark.parametrize("bound", ["upstream", "gradient"])
def test_rounding_error_stays_small_where_gradients_are_normalized(name: str, bound: str) -> None:
    """It is scaled by at most C2 / 2^-14, for any C1."""
    case = CASES[name]
    for input_norm, grad_norm in ((1.5, 0.7), (20.0, 0.7), (1.5, 50.0)):
        model = clipped(case, mode="normalize", bound=bound, input_norm=input_norm, grad_norm=grad_norm)
        x = inputs(case)
        g = 2.0**-36 * upstream(model(x))
        with unclipped():
            true = gradients(model, model(x), g)
        for a, b in zip(gradients(model, model(x), g), true, strict=True):
            torch.testing.assert_close(a, 2.0**14 * grad_norm * b, rtol=1e-9, atol=1e-18)


@every_case
def test_a_short_gradient_is_not_clipped(name: str) -> None:
    """Far below all bounds it is the derivative, nearly bit for bit."""
    case = CASES[name]
    model, x = clipped(case), inputs(case, scale=1e-2)
    y = model(x)
    g = upstream(y, 1e-4)
    with unclipped():
        expected = gradients(model, y, g)
    for a, b in zip(gradients(model, model(x), g), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("attention")])
@pytest.mark.parametrize("bound", ["upstream", "gradient"])
def test_bounds_are_reached(name: str, bound: str) -> None:
    """So no bound could be much smaller. (Fewer candidates are tried for recurrent layers.)"""
    case = CASES[name]
    model = clipped(case, mode="normalize", bound=bound)
    reached = dict.fromkeys(bounds(model), 0.0)
    for x, g in _candidates(model, inputs(case, 1, 30.0), case.ids > 0):
        found = gradients(model, model(x), g)
        for (parameter, most), gradient in zip(bounds(model).items(), found, strict=True):
            share = float(gradient.norm()) / most
            assert share <= 1, parameter
            reached[parameter] = max(reached[parameter], share)
    least = 0.3 if "weight_ih" in str(reached) else 0.8 if name in ("reflect", "replicate") else 0.9
    assert all(share > least for share in reached.values()), reached


def _candidates(model: nn.Module, x: Tensor, is_ids: bool) -> list[tuple[Tensor, Tensor]]:
    """Gradients at a single output, constant or random; also inputs at single positions."""
    with torch.no_grad():
        y = model(x)
    single = torch.zeros_like(y)
    single.view(-1)[single.numel() // 2] = 1.0
    gradients_ = [single, torch.ones_like(y), upstream(y)]
    inputs_ = [x] if is_ids else [x, torch.ones_like(x) * 30]
    if not is_ids:
        for place in range(x.numel()):
            spike = torch.zeros_like(x)
            spike.view(-1)[place] = 30.0
            inputs_.append(spike)
    else:
        inputs_ += [torch.zeros_like(x)]
    return [(a, b) for a in inputs_ for b in gradients_]


@every_case
@every_way
def test_the_same_without_synchronization(name: str, mode: str, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU rows are cleared and directions removed without checking whether it is needed."""
    case = CASES[name]
    model, x = clipped(case, mode=mode, bound=bound), inputs(case, scale=1.0)
    with_x = [] if case.ids else [x.requires_grad_()]
    y = model(x)
    g = upstream(y, 3.0)
    g[1].view(-1)[0] = math.nan
    expected = gradients(model, y, g, *with_x)
    monkeypatch.setattr(linear_map, "surely_none", lambda flags_B: False)
    for a, b in zip(gradients(model, model(x), g, *with_x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


CONVOLUTIONS = [n for n, case in CASES.items() if isinstance(case.build(), _ConvNd)]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_windows_are_counted(name: str) -> None:
    """m and cover, from a convolution that shows which windows contain which pixel."""
    case = CASES[name]
    layer = case.build().double()
    assert isinstance(layer, _ConvNd)
    pixels = math.prod(case.shape[1:])
    one_channel = type(layer)(  # type: ignore[call-arg]
        1, math.prod(layer.kernel_size), layer.kernel_size, layer.stride, layer.padding, layer.dilation,
        bias=False, padding_mode=layer.padding_mode, dtype=torch.float64,
    )  # fmt: skip
    taps = one_channel.weight.numel() // one_channel.out_channels
    one_channel.weight.data = torch.eye(taps, dtype=torch.float64).view(one_channel.weight.shape)
    single = torch.eye(pixels, dtype=torch.float64).view(pixels, 1, *case.shape[1:])
    held = one_channel(single).flatten(2).sum(1)  # [pixels, windows]: how often
    most, cover = Convolution(layer).counts(case.shape[1:])  # type: ignore[arg-type]
    assert (most, cover) == (int(held.max()), int(held.sum(1).max()))


@pytest.mark.parametrize("name", ["linear", "linear over positions", *CONVOLUTIONS])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from(["dense", "sparse"]))
def test_the_bound_by_windows_lies_between_the_gradient_and_the_other_bounds(name: str, seed: int, kind: str) -> None:
    case = CASES[name]
    layer = case.build().double()
    a_map = Convolution(layer) if isinstance(layer, _ConvNd) else Matrix()  # type: ignore[arg-type]
    x = inputs(case, 1, seed=seed)
    if kind == "sparse":
        x = torch.where(x.abs() > 1.2, x, 0)
    g = upstream(layer(x), seed=seed)
    true = a_map.pull_back(g, a_map.seen(x), layer.weight.detach(), False, True)[1]  # type: ignore[union-attr]
    assert true is not None
    windows = float(a_map.gradient_norm(g.abs(), a_map.window_lengths(a_map.squares(x))))
    other = float(lengths(x) * a_map.upstream_norm(g, a_map.over_positions(g.abs()), x.shape))
    assert float(true.norm()) <= windows * (1 + 1e-9) <= other * (1 + 1e-6)


@pytest.mark.parametrize("name", ["linear over positions", "conv2d"])
def test_lengths_of_half_precision_inputs_are_not_too_short(name: str) -> None:
    """Their squares would lose eight of sixteen bits."""
    case = CASES[name]
    layer = case.build().double()
    a_map = Convolution(layer) if isinstance(layer, _ConvNd) else Matrix()  # type: ignore[arg-type]
    x = inputs(case, 64).bfloat16()
    found, exact = (a_map.window_lengths(a_map.squares(t)) for t in (x, x.double()))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def test_a_gradient_of_rounding_error_is_not_scaled_up() -> None:
    """The gradient of the keys' bias is 0: adding a number to all scores does not change the softmax."""
    case = CASES["attention"]
    model = clipped(case, mode="normalize").float()
    y = model(inputs(case).float())
    gradient = gradients(model, y, upstream(y).float())[1].view(3, -1)
    assert float(gradient[1].norm()) < 1e-4 < 0.05 < float(gradient[0].norm())


def test_the_sum_of_terms_that_cancel_is_not_scaled_up() -> None:
    """A bias's gradient over positions: 2^-20 of its terms, and 2^-8 relative to a bound of their size."""
    model = clipped(CASES["linear over positions"], mode="normalize").float()
    g = torch.ones(1, 4, 3)
    g[:, 2:] = -1 + 2.0**-20
    bias = gradients(model, model(inputs(CASES["linear over positions"], 1).float()), g)[1]
    assert 0 < float(bias.norm()) < 2.0**-12


@pytest.mark.parametrize(("queries", "keys"), [(4, 1), (1, 4)])
def test_queries_keys_and_values_are_of_the_same_examples(queries: int, keys: int) -> None:
    model = clip_inputs(nn.MultiheadAttention(6, 2, batch_first=True), input_norm=1.0)
    q, k = torch.randn(queries, 3, 6), torch.randn(keys, 5, 6)
    with pytest.raises(ConfigurationError, match="different numbers of examples") as refused:
        model(q, k, k)
    assert not any(c.isdigit() for c in str(refused.value))  # the realised batch size is secret


@every_way
@pytest.mark.parametrize("same", ["all", "keys and values", "none"])
def test_one_input_given_several_times_equals_copies(mode: str, bound: str, same: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(6, 2, batch_first=True).double()
        x = torch.randn(4, 5, 6).double()
    y = x if same == "all" else x.flip(0)
    z = y.tanh() if same == "none" else y
    model = clip_inputs(layer, input_norm=1.5, grad_norm=0.7, mode=mode, bound=bound)
    found, expected = (
        gradients(model, model(*given)[0], torch.ones(4, 5, 6).double())
        for given in ((x, y, z), (x.clone(), y.clone(), z.clone()))
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_messages_name_the_layer() -> None:
    layer = clipped(CASES["linear"])
    assert isinstance(layer, ClippedLayer)
    with pytest.raises(ValueError, match="dimensions"):
        layer(torch.zeros(5).double())


def test_positions_without_a_gradient_do_not_loosen_the_bound_of_a_table() -> None:
    """64 words and 64 padding positions: no id counts twice, so the bound is exact."""
    ids_BT = torch.cat([torch.arange(1, 65), torch.zeros(64, dtype=torch.long)])[None]
    g_BTd = torch.randn(1, 128, 16, dtype=torch.float64)
    g_BTd[:, 64:] = 0
    assert math.isclose(float(lookup_norm(ids_BT, g_BTd)), float(g_BTd.norm()), rel_tol=1e-6)
    assert math.isclose(float(lookup_norm(0 * ids_BT, g_BTd)), float(g_BTd.abs().sum(1).norm()), rel_tol=1e-6)
    assert float(lookup_norm(ids_BT, 0 * g_BTd)) < 1e-100


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_clipped_attention_exports_with_any_number_of_examples(masked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = clip_inputs(layer, input_norm=1.0).eval()
    x, mask = torch.randn(5, 4, 8), torch.zeros(5, 4, dtype=torch.bool)
    mask[:, 3] = masked
    examples = torch.export.Dim("examples", min=2)
    shapes = {"src": {0: examples}, "src_key_padding_mask": {0: examples}}
    arguments = {"src": x, "src_key_padding_mask": mask}
    exported = torch.export.export(model, (), arguments, dynamic_shapes=shapes).module()
    with torch.no_grad():
        few = {name: value[:3] for name, value in arguments.items()}
        torch.testing.assert_close(exported(**few), model(**few))


def test_a_causal_hint_without_its_mask_is_refused_as_torch_does() -> None:
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    x = torch.randn(2, 3, 6)
    with pytest.raises(RuntimeError, match="attn_mask"):
        layer(x, x, x, is_causal=True)
    model = clip_inputs(nn.Sequential(layer), input_norm=1.0)
    with pytest.raises(ConfigurationError, match="Layer '0' got is_causal without attn_mask"):
        model[0](x, x, x, is_causal=True)  # type: ignore[index, operator]


@pytest.mark.parametrize("bound", ["upstream", "gradient"])
@pytest.mark.parametrize("name", ["linear", "linear over positions", "conv2d", "padding", "lstm", "attention"])
def test_an_input_whose_square_is_beyond_float32_is_clipped(name: str, bound: str) -> None:
    """In training and in evaluation: it counts as 0 in neither."""
    case = CASES[name]
    model, x = clipped(case, bound=bound).float(), inputs(case).float()
    x[1] *= 1e20
    with torch.no_grad():
        still = model(x)
    y = model(x)
    torch.testing.assert_close(y, still, rtol=1e-4, atol=1e-5)
    found = gradients(model, y, upstream(y).float())
    alone = gradients(model, model(x[:1]), upstream(y)[:1].float())
    for (parameter, most), total, one_of_them in zip(bounds(model).items(), found, alone, strict=True):
        assert bool(torch.isfinite(total).all()) and bool(torch.isfinite(one_of_them).all())
        assert float(total.norm()) <= EXAMPLES * most, parameter


@every_way
@pytest.mark.parametrize("name", ["linear", "linear over positions", "conv2d", "layer norm", "embedding"])
def test_no_rounded_scale_exceeds_the_bound(name: str, mode: str, bound: str) -> None:
    """Below 1e-38 float32 has few digits: a rounded scale may be half too large."""
    case = CASES[name]
    model = clipped(case, mode=mode, bound=bound, grad_norm=1e-10).float()
    x = inputs(case)
    x = x.float() if x.is_floating_point() else x
    for power in range(27, 38):
        y = model(x[:1])
        found = gradients(model, y, torch.full_like(y, 10.0**power) / y.numel())
        for (parameter, most), g in zip(bounds(model).items(), found, strict=True):
            assert float(g.double().norm()) <= most, (parameter, power)


@every_way
@pytest.mark.parametrize("constant", [1.0, 1e-10])
@pytest.mark.parametrize("name", ["linear", "linear over positions"])
def test_no_rounded_scale_exceeds_the_bound_for_a_long_input(name: str, constant: float, mode: str, bound: str) -> None:
    """Both clips scale a gradient at once: here by 1e-45 to 1e-42 together."""
    case = CASES[name]
    model = clipped(case, mode=mode, bound=bound, input_norm=constant, grad_norm=constant).float()
    x = inputs(case)[:1] / inputs(case)[:1].norm()
    for longer, power in itertools.product((2, 17, 37), torch.arange(42, 45, 0.1).tolist()):
        y = model((x * 10.0**longer).float())
        steeper = 10.0 ** min(power + 2 * math.log10(constant) - longer, 37.0)
        found = gradients(model, y, torch.full_like(y, steeper) / math.sqrt(y.numel()))
        for (parameter, most), g in zip(bounds(model).items(), found, strict=True):
            assert float(g.double().norm()) <= most, (parameter, longer, power)


def test_a_short_gradient_is_not_rounded_up_next_to_a_huge_input() -> None:
    """It needs no clip, but its product with the input's scale has few digits."""
    model = clip_inputs(nn.Linear(1, 1, bias=False), input_norm=1.0, grad_norm=1e-10)
    for longer, share in itertools.product((33, 34, 35, 36, 37), torch.arange(0.1, 1.0, 0.05).tolist()):
        y = model(torch.tensor([[10.0**longer]]))
        (g,) = gradients(model, y, torch.full_like(y, share * 1e-10))
        assert float(g.double().norm()) <= 1e-10, (longer, share)


@pytest.mark.parametrize("bound", ["upstream", "gradient"])
def test_the_scale_of_a_huge_input_is_not_rounded_up_in_recurrent_layers(bound: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = clip_inputs(nn.RNN(1, 1), input_norm=1e-10, grad_norm=1.0, bound=bound)
    for power in torch.arange(34, 36, 0.05).tolist():
        y, _ = model(torch.full((1, 1, 1), 10.0**power))
        found = gradients(model, y, torch.full_like(y, 1e3))
        for (parameter, most), g in zip(bounds(model).items(), found, strict=True):
            assert float(g.double().norm()) <= most, (parameter, power)


@every_way
@pytest.mark.parametrize("name", ["linear", "linear over positions", "conv2d", "padding", "attention"])
def test_an_input_whose_square_is_below_float32_does_not_hide_its_gradient(name: str, mode: str, bound: str) -> None:
    case = CASES[name]
    model = clipped(case, mode=mode, bound=bound).float()
    for power in (-18, -20, -22, -24, -30):
        y = model((inputs(case)[:1] * 10.0**power).float())
        found = gradients(model, y, torch.full_like(y, 1e37) / y.numel())
        for (parameter, most), g in zip(bounds(model).items(), found, strict=True):
            assert float(g.double().norm()) <= most, (parameter, power)


@pytest.mark.parametrize("kernel", [3, 5])
def test_a_long_gradient_where_an_image_is_blank_adds_nothing(kernel: int) -> None:
    """The bound is 0, so nothing is clipped, and the gradient must be exactly 0. (GPU: tests/gpu/backprop.py.)"""
    layer = nn.Conv2d(16, 16, kernel, padding=kernel // 2, bias=False)
    model = clip_inputs(layer, input_norm=1.0, grad_norm=0.1, bound="gradient")
    random = torch.Generator().manual_seed(3)
    x, g = (torch.randn(2, 16, 32, 32, generator=random) for _ in range(2))
    x[..., 16:] = 0
    g[..., : 16 + kernel // 2] = 0
    for form in (torch.contiguous_format, torch.channels_last):
        laid = [t.contiguous(memory_format=form) for t in (x, 1e6 * g)]
        (found,) = gradients(model.to(memory_format=form), model(laid[0]), laid[1])  # type: ignore[call-overload]
        assert float(found.norm()) <= 1e-3 * 0.1


@pytest.mark.parametrize(
    "attributes",
    [{"padding": (2, 1)}, {"padding": 2, "dilation": 2}, {"stride": 2}, {"padding": "same"}, {"padding": "valid"}],
    ids=str,
)
def test_a_geometry_that_is_set_by_attributes_is_the_one_that_is_used(attributes: dict[str, object]) -> None:
    """Backbones set attributes to get dilated features."""
    layer = nn.Conv2d(2, 3, 3, padding=1).double()
    for name, value in attributes.items():
        setattr(layer, name, value)
    model = clip_inputs(layer, input_norm=1.0, grad_norm=0.7)
    x = torch.randn(2, 2, 8, 8).double()
    with torch.no_grad():
        still = model(x)
    y = model(x)
    torch.testing.assert_close(y, still)
    for (parameter, most), g in zip(bounds(model).items(), gradients(model, y[:1], 1e3 * y[:1]), strict=True):
        assert float(g.norm()) <= most, parameter


def test_the_kernel_is_that_of_the_weights() -> None:
    """torch ignores `kernel_size`, so the bounds must too."""
    layer = nn.Conv2d(1, 4, 1, padding=1).double()
    layer.weight = nn.Parameter(torch.randn(4, 1, 3, 3).double())
    model = clip_inputs(layer, input_norm=1.0, grad_norm=0.7)
    x = torch.randn(2, 1, 6, 6).double()
    assert Convolution(layer).counts((6, 6)) == (1, 9)
    layer.kernel_size = (2, 2)
    y = model(x)
    assert model._role.map.counts((6, 6)) == (1, 9)  # type: ignore[union-attr, operator]
    with torch.no_grad():
        torch.testing.assert_close(y, model(x))
