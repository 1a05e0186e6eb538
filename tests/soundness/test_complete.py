"""No trainable parameter is missing from the sum, and the model keeps nothing else of the examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise
from clipwise.clipping import PerExample
from clipwise.errors import CoupledExamplesError, UnsupportedModelError
from clipwise.gradients import METHODS, FallbackWarning, Memory, by_loop, per_example_gradients, register, registered
from clipwise.gradients.forms import Form, Written
from clipwise.gradients.layout import Layout, Ragged
from clipwise.gradients.rules import registry
from clipwise.gradients.walk import Node, node_name, walk
from clipwise.validation.inventory import Inventory
from clipwise.validation.step_guard import BufferGuard
from clipwise.validation.step_inputs import require_no_batch_statistics
from tests.gradients.cases import CASES, Case, Scale, losses, oracle, trainable
from tests.soundness.neighbours import attach

# Rules without a case, and why. Those for CUDA are tested below with a stand-in node.
EXEMPT = {
    "FusedRmsNormBackward0": "torch fuses RMSNorm on CUDA only; elsewhere it is products and means",
    "CudnnBatchNormBackward0": "cuDNN's batch norm exists on CUDA only",
    "CudnnRnnBackward0": "cuDNN's recurrent networks exist on CUDA only",
    "GroupedMmBackward0": "grouped_mm takes no float64, in which the cases run; tests/gradients/test_experts.py has it",
}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


# Every parameter


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_an_unused_parameter_is_an_error_by_name(method: str, batch: int) -> None:
    model = TwoHeads()
    with pytest.raises(UnsupportedModelError, match=r"forgotten\.weight.*forgotten\.bias"):
        attach(model, PerExample(method=method)).clipped_sum(model(torch.randn(batch, 3)).sum(1))


def test_a_frozen_parameter_may_be_unused() -> None:
    model = TwoHeads()
    model.forgotten.requires_grad_(False)
    total = attach(model, PerExample()).clipped_sum(model(torch.randn(4, 3)).sum(1))
    assert set(total) == {"used.weight", "used.bias"}


def test_a_detached_parameter_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(UnsupportedModelError, match=r"0\.weight"):
        per_example_gradients(model[1](model[0](torch.randn(4, 3)).detach()).sum(1), trainable(model), Memory())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_parameter_of_every_case_is_in_the_sum(case: Case) -> None:
    model = case.build(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        total = attach(model, PerExample()).clipped_sum(losses(model, case.draw(3, torch.float32)))
    assert {n: t.shape for n, t in total.items()} == {n: p.shape for n, p in trainable(model).items()}
    assert all(t.any() for t in total.values())


# Every rule


def exercised(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The rules that gave forms on the cases, in float32 and float64."""
    seen: set[str] = set()

    def spied(name: str, rule: Any) -> Any:
        def spy(node: Node, shapes: registry.Shapes) -> Any:
            finish = rule(node, shapes)

            def finished(*arguments: Any) -> dict[int, Form]:
                forms: dict[int, Form] = finish(*arguments)
                seen.add(name)
                return forms

            return finished

        return spy

    rules = {name: found._replace(rule=spied(name, found.rule)) for name, found in registry.RULES.items()}
    monkeypatch.setattr(registry, "RULES", rules)
    for case in CASES:
        for dtype in (torch.float32, torch.float64):
            model = case.build(dtype)
            per_example_gradients(losses(model, case.draw(3, dtype)), trainable(model), Memory())
    return seen


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
def test_there_is_no_rule_without_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = set(registered())
    assert set(EXEMPT) <= rules, "an exempt rule is no longer registered: take it off the list"
    found = exercised(monkeypatch)
    assert rules - found - set(EXEMPT) == set(), "add a case to tests/gradients/cases.py"
    assert not found & set(EXEMPT), "an exempt rule has a case now: take it off the list"


# The saved attributes that each rule reads. They are semi-private in torch: this table detects changes.
SAVED = {
    "AddBackward0": {"_saved_alpha"},
    "SubBackward0": {"_saved_alpha"},
    "MulBackward0": {"_saved_self", "_saved_other"},
    "DivBackward0": {"_saved_self", "_saved_other"},
    "AddmmBackward0": {"_saved_alpha", "_saved_beta", "_saved_mat1", "_saved_mat2"},
    "MmBackward0": {"_saved_self", "_saved_mat2"},
    "BmmBackward0": {"_saved_self", "_saved_mat2"},
    "PreluKernelBackward0": {"_saved_self"},
    "ConvolutionBackward0": {
        "_saved_transposed", "_saved_input", "_saved_stride", "_saved_padding", "_saved_dilation",
        "_saved_output_padding", "_saved_groups",
    },
    "EmbeddingBackward0": {"_saved_scale_grad_by_freq", "_saved_indices", "_saved_padding_idx"},
    "NativeLayerNormBackward0": {"_saved_input", "_saved_result1", "_saved_result2"},
    "NativeGroupNormBackward0": {"_saved_input", "_saved_result1", "_saved_result2"},
    "NativeBatchNormBackward0": {
        "_saved_input", "_saved_training", "_saved_running_mean", "_saved_running_var", "_saved_eps",
    },
    "EmbeddingBagBackward0": {
        "_saved_scale_grad_by_freq", "_saved_mode", "_saved_indices", "_saved_offsets", "_saved_padding_idx",
        "_saved_per_sample_weights", "_saved_result3",
    },
    "WhereBackward0": {"_saved_condition"},
    "MaskedFillBackward0": {"_saved_mask"},
    "MaskedFillBackward1": {"_saved_mask"},
    "IndexBackward0": {"_saved_indices"},
    "IndexSelectBackward0": {"_saved_dim", "_saved_index"},
    "TrilinearBackward0": {
        "_saved_i1", "_saved_i3", "_saved_expand1", "_saved_expand2", "_saved_expand3", "_saved_sumdim",
    },
    "MkldnnRnnLayerBackward0": {
        "_saved_mode", "_saved_has_biases", "_saved_reverse", "_saved_input", "_saved_result0", "_saved_hx_",
        "_saved_cx_", "_saved_weight0", "_saved_weight1", "_saved_weight2", "_saved_weight3",
    },
    "SelectBackward0": {"_saved_index", "_saved_dim", "_saved_self_sym_sizes"},
    "SliceBackward0": {"_saved_start", "_saved_end", "_saved_dim", "_saved_self_sym_sizes"},
    "SplitWithSizesBackward0": {"_saved_split_sizes", "_saved_dim", "_saved_self_sym_sizes"},
    "RollBackward0": {"_saved_shifts"},
}  # fmt: skip


def nodes() -> dict[str, Node]:
    """One node of each kind in SAVED."""
    w = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4)
    norm = nn.BatchNorm1d(4).eval()
    made = [
        w + x, w - x, w * x, w / x, w * w, w / w, torch.addmm(w, x, w), w @ w,
        F.conv1d(x[None], w[:, :, None]), F.embedding(torch.tensor([0]), w), F.layer_norm(x, (4,), w[0]),
        F.group_norm(x, 2, w[0]), norm(w), w[1], w[1:2], w.split([1, 3])[0], w.roll(1, 0),
        torch.bmm(w[None], w[None]), F.prelu(x, w[0]), w[torch.tensor([0, 1])],
        w.masked_fill(x > 0, 0), w.masked_fill(x > 0, w[0, 0]), torch.where(x > 0, w, x),
        w.index_select(0, torch.tensor([1])), F.embedding_bag(torch.tensor([[0, 1]]), w),
    ]  # fmt: skip
    found = {node_name(t.grad_fn): t.grad_fn for t in made}
    # Inside the modules that create them.
    for out in (nn.LSTM(4, 4)(x[None])[0], nn.Bilinear(4, 4, 4)(x, x)):
        node = out.grad_fn
        while node is not None and node_name(node) not in SAVED.keys() - found.keys():
            node = node.next_functions[0][0]
        found[node_name(node)] = node
    return found


@pytest.mark.parametrize("name", SAVED)
def test_torch_saves_under_the_names_that_are_read(name: str) -> None:
    missing = SAVED[name] - set(dir(nodes()[name]))
    assert not missing, f"torch {torch.__version__} uses other names"


def test_the_table_of_saved_names_has_every_rule() -> None:
    # Everything is in the gradient of the output, or in an operation of clipwise.
    no_names = {"ExpandBackward0", "RepeatBackward0", "_WeightGradientBackward"}
    assert set(registered()) - set(EXEMPT) - no_names <= set(SAVED)


def test_a_missing_name_leads_to_the_fallback_and_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a future version of torch."""

    def blind(node: Node, shapes: registry.Shapes) -> registry.Finish:
        return node._saved_under_a_new_name

    monkeypatch.setitem(registry.RULES, "AddmmBackward0", registry.Registered(blind))
    model, x = nn.Linear(5, 3).double(), torch.randn(4, 5, dtype=torch.float64)
    with pytest.warns(FallbackWarning, match="AddmmBackward0"):
        found = per_example_gradients(losses(model, (x,)), trainable(model), Memory()).instantiate(slice(0, 4))
    for name, expected in oracle(model, (x,)).items():
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_rule_is_found_before_any_release(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = registered()["AddmmBackward0"]

    def wrong(node: Node, shapes: registry.Shapes) -> registry.Finish:
        finish = honest(node, shapes)
        return lambda g, layout: finish(g * 1.1, layout)

    monkeypatch.setitem(registry.RULES, "AddmmBackward0", registry.Registered(wrong))
    model, x = nn.Linear(5, 3).to(dtype), torch.randn(4, 5).to(dtype)
    with pytest.raises(UnsupportedModelError, match="does not agree with plain autograd"):
        per_example_gradients(losses(model, (x,)), trainable(model), Memory())


def test_a_users_own_rule_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    case = next(c for c in CASES if c.name == "custom function")
    called = []

    @register("SquaredDistanceBackward")
    def squared_distance(node: Node, shapes: registry.Shapes) -> registry.Finish:
        x, w = node.saved_tensors

        def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
            called.append(node)
            d = -2 * g[..., None] * (x[..., None, :] - w)
            return {1: Written.of(layout.split(d).flatten(1, -3).sum(1))}

        return finish

    model, inputs = case.build(), case.draw(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        found = per_example_gradients(losses(model, inputs), trainable(model), Memory()).instantiate(slice(0, 3))
    assert called
    for name, expected in oracle(model, inputs).items():
        torch.testing.assert_close(found[name], expected)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(x, self.w).tanh()


@pytest.mark.parametrize("mistake", [1, 2])
def test_the_documented_rule_works_and_is_checked_on_first_use(mistake: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))

    @clipwise.gradients.register("ScaleBackward")
    def scale(node, shapes):
        x, _ = node.saved_tensors

        def finish(g, layout):
            return {1: clipwise.gradients.Written.of(mistake * layout.rows(g * x).sum(1))}

        return finish

    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(4, 3, 5, dtype=torch.float64)
    clipper = attach(model, PerExample())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        if mistake > 1:
            with pytest.raises(UnsupportedModelError, match="'w' does not agree with plain autograd"):
                clipper.clipped_sum(losses(model, (x,)))
            return
        total = clipper.clipped_sum(losses(model, (x,)))
    truth = oracle(model, (x,))["w"]
    torch.testing.assert_close(total["w"], (truth * (1 / truth.norm(dim=1)).clamp(max=1)[:, None]).sum(0))


class StandIn(SimpleNamespace):
    """A node as torch makes it on CUDA."""

    def name(self) -> str:
        return str(self.node_name)


@pytest.mark.parametrize("positions", [(), (3,), (2, 3)])
def test_the_rule_for_fused_rms_norm(positions: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    B, n = 4, 5
    x, g = torch.randn(B, *positions, n).double(), torch.randn(B, *positions, n).double()
    rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    node = StandIn(node_name="FusedRmsNormBackward0", _saved_input=x, _saved_result1=rstd)
    finish = registered()["FusedRmsNormBackward0"](node, {1: torch.Size([n])})
    found = finish(g, Layout(0, 1, B, 1))[1].instantiate(slice(0, B))
    for i in range(B):
        w = torch.ones(n, dtype=torch.float64, requires_grad=True)
        (F.rms_norm(x[i], (n,), w, eps=1e-6) * g[i]).sum().backward()
        torch.testing.assert_close(found[i], w.grad)


def test_the_rule_for_cudnn_batch_norm() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3).double().eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    x, g = torch.randn(4, 3, 2, 2).double(), torch.randn(4, 3, 2, 2).double()
    node = StandIn(
        node_name="CudnnBatchNormBackward0", _saved_input=x, _saved_training=False,
        _saved_running_mean=norm.running_mean, _saved_running_var=norm.running_var, _saved_epsilon=norm.eps,
    )  # fmt: skip
    shapes = {1: torch.Size([3]), 2: torch.Size([3])}
    forms = registered()["CudnnBatchNormBackward0"](node, shapes)(g, Layout(0, 1, 4, 1))
    for i in range(4):
        expected = torch.autograd.grad((norm(x[i : i + 1]) * g[i]).sum(), [norm.weight, norm.bias])
        for operand, e in zip((1, 2), expected, strict=True):
            torch.testing.assert_close(forms[operand].instantiate(slice(i, i + 1))[0], e)
    node._saved_training = True
    with pytest.raises(CoupledExamplesError):
        registered()["CudnnBatchNormBackward0"](node, shapes)


RECURRENT = [
    (kind, options)
    for kind in (nn.RNN, nn.LSTM, nn.GRU)
    for options in (
        {},
        {"bias": False, "batch_first": True},
        {"num_layers": 3, "bidirectional": True},
        *([{"nonlinearity": "relu", "num_layers": 2}] if kind is nn.RNN else []),
        *([{"proj_size": 2, "num_layers": 2, "bidirectional": True}] if kind is nn.LSTM else []),
    )
]


def cudnn_node(net: nn.RNNBase, x: Tensor, out: Tensor, h0: Tensor, c0: Tensor | None) -> StandIn:
    """Return what cuDNN's node would have saved."""
    kind = {nn.LSTM: 2, nn.GRU: 3}.get(type(net), {"tanh": 1, "relu": 0}.get(getattr(net, "nonlinearity", "")))
    return StandIn(
        node_name="CudnnRnnBackward0", _saved_weight=list(net._flat_weights), _saved_batch_sizes=(),
        _saved_num_layers=net.num_layers, _saved_train=True, _saved_dropout=net.dropout, _saved_mode=kind,
        _saved_batch_first=net.batch_first, _saved_bidirectional=net.bidirectional,
        _saved_proj_size=net.proj_size, _saved_input=x, _saved_result0=out.detach(), _saved_hx=h0, _saved_cx=c0,
    )  # fmt: skip


def require_gradients(
    net: nn.RNNBase, node: StandIn, outputs: Any, g: dict[int, Tensor], layouts: dict[int, Layout]
) -> None:
    """The rule's forms are the gradients of each example's share of the outputs."""
    weights = [getattr(net, n) for layer in net._all_weights for n in layer]
    with torch.no_grad():
        rule: Any = registered()["CudnnRnnBackward0"]
        forms = rule(node, {1 + j: w.shape for j, w in enumerate(weights)})(g, layouts)
    for i in range(next(iter(layouts.values())).batch):
        loss = sum((layouts[k].only(g[k], i) * outputs[k]).sum() for k in g)
        truth = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
        for j, expected in enumerate(truth):
            torch.testing.assert_close(forms[1 + j].instantiate(slice(i, i + 1))[0], expected)


@pytest.mark.parametrize("used", [{0, 1, 2}, {0}, {1}])
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_the_rule_for_cudnn_recurrent_networks(
    kind: type[nn.RNNBase], options: dict[str, object], used: set[int]
) -> None:
    torch.manual_seed(0)
    B, T, H = 3, 4, 5
    net = kind(2, H, **options).double()
    rows = net.num_layers * (1 + net.bidirectional)
    x = torch.randn(*((B, T) if net.batch_first else (T, B)), 2).double()
    h0, c0 = (torch.randn(rows, B, size).double() for size in (net.proj_size or H, H))
    state: Any = (h0, c0) if kind is nn.LSTM else h0
    out, last = net(x, state)
    outputs = {0: out, **dict(enumerate(last if isinstance(last, tuple) else (last,), 1))}
    g = {k: torch.randn_like(outputs[k]) for k in used & set(outputs)}
    layouts = {k: Layout(0 if k == 0 and net.batch_first else 1, 1, B, 1) for k in g}
    node = cudnn_node(net, x, out, h0, c0 if kind is nn.LSTM else None)
    require_gradients(net, node, outputs, g, layouts)


@pytest.mark.parametrize("used", [{0, 1, 2}, {0}, {1}, {2}])
@pytest.mark.parametrize(("kind", "options"), [r for r in RECURRENT if "batch_first" not in r[1]])
def test_the_rule_for_cudnn_recurrent_networks_of_packed_sequences(
    kind: type[nn.RNNBase], options: dict[str, object], used: set[int]
) -> None:
    torch.manual_seed(0)
    B, T, H = 4, 5, 3
    net = kind(2, H, **options).double()
    rows = net.num_layers * (1 + net.bidirectional)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(T, B, 2).double(), torch.tensor([5, 3, 3, 1]))
    h0, c0 = (torch.randn(rows, B, size).double() for size in (net.proj_size or H, H))
    out, last = net(packed, (h0, c0) if kind is nn.LSTM else h0)
    outputs = {0: out.data, **dict(enumerate(last if isinstance(last, tuple) else (last,), 1))}
    if not used & set(outputs):
        return
    # The examples in another order than the sequences, which are sorted by their length.
    order = torch.tensor([2, 0, 3, 1])
    sequence = torch.cat([torch.arange(int(n)) for n in packed.batch_sizes])
    owners = {0: order[sequence], 1: order, 2: order}
    g = {k: torch.randn_like(outputs[k]) for k in used & set(outputs)}
    layouts = {k: Ragged.of(0 if k == 0 else 1, owners[k], B) for k in g}
    node = cudnn_node(net, packed.data, out.data, h0, c0 if kind is nn.LSTM else None)
    node._saved_batch_sizes = tuple(packed.batch_sizes.tolist())
    require_gradients(net, node, outputs, g, layouts)


def test_the_rule_for_cudnn_recurrent_networks_leaves_the_rest_to_the_fallback() -> None:
    net, x = nn.LSTM(2, 3, 2, dropout=0.5), torch.randn(4, 2, 2)
    out, _ = net(x)
    h0 = torch.zeros(2, 2, 3)
    node, shapes = cudnn_node(net, x, out, h0, h0), {1: net.weight_ih_l0.shape}
    rule = registered()["CudnnRnnBackward0"]
    with pytest.raises(registry.RuleDoesNotApply, match="dropout"):
        rule(node, shapes)
    node._saved_dropout = 0.0
    rule(node, shapes)
    with pytest.raises(registry.RuleDoesNotApply, match="computed from parameters"):
        rule(node, {0: x.shape})


# Randomness inside the model: a pass per example would draw other masks, so the graph itself is the oracle.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_dropout_between_recurrent_layers(kind: type[nn.RNNBase], method: str) -> None:
    torch.manual_seed(0)
    model = kind(5, 4, num_layers=2, dropout=0.5, batch_first=True)
    found = model(torch.randn(4, 6, 5))[0].square().sum((1, 2))
    expected = by_loop(found, trainable(model)).instantiate(slice(0, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        ours = per_example_gradients(found, trainable(model), Memory(), method).instantiate(slice(0, 4))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


# The fallback

_spatial = {1: (7,), 2: (6, 5), 3: (4, 5, 4)}
PADDINGS = ("zeros", "reflect", "replicate", "circular")


def _convolutions() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    found: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {}
    for dims, kind in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        for mode in PADDINGS:
            options = {"kernel_size": 2, "padding": 1, "padding_mode": mode}
            found[f"{kind.__name__} {mode}"] = (lambda k=kind, o=options: k(4, 4, **o), (4, *_spatial[dims]))
        options = {"kernel_size": 2, "stride": 2, "dilation": 2, "groups": 2}
        found[f"{kind.__name__} strided"] = (lambda k=kind, o=options: k(4, 4, **o), (4, *_spatial[dims]))
        found[f"{kind.__name__} depthwise"] = (
            lambda k=kind: k(4, 8, 3, groups=4, bias=False), (4, *_spatial[dims]),
        )  # fmt: skip
    return found


FAST: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{f"Linear {k} middle": (lambda: nn.Linear(5, 3), (*[2, 3, 2, 2][:k], 5)) for k in range(5)},
    "Linear no bias": (lambda: nn.Linear(5, 3, bias=False), (2, 5)),
    **_convolutions(),
    "LayerNorm": (lambda: nn.LayerNorm((2, 5)), (3, 2, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 3)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 2)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4, affine=True), (4, 3, 2, 2)),
    "RMSNorm": (lambda: nn.RMSNorm(5), (2, 5)),
    "RMSNorm 2-D": (lambda: nn.RMSNorm((2, 5)), (3, 2, 5)),
}


@pytest.mark.parametrize("marked", [False, True], ids=["data", "data that require gradients"])
@pytest.mark.parametrize("name", FAST)
def test_ordinary_layers_never_reach_the_fallback(name: str, marked: bool) -> None:
    build, shape = FAST[name]
    model, x = nn.Sequential(build(), nn.Tanh()), torch.randn(3, *shape, requires_grad=marked)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        per_example_gradients(losses(model, (x,)), trainable(model), Memory())


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("shape", [(), (1,), (6,), (3, 2)])
def test_embeddings_never_reach_the_fallback(shape: tuple[int, ...], padding_idx: int | None) -> None:
    model = nn.Sequential(nn.Embedding(3, 4, padding_idx=padding_idx), nn.Tanh())
    x = torch.randint(1, 3, (5, *shape))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        per_example_gradients(losses(model, (x,)), trainable(model), Memory())


def test_the_fallback_is_announced_once_by_name() -> None:
    case = next(c for c in CASES if c.name == "custom function")
    model, inputs, memory = case.build(), case.draw(4), Memory()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            per_example_gradients(losses(model, inputs), trainable(model), memory)
    warned = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    assert len(warned) == 1
    assert "SquaredDistanceBackward" in warned[0] and "w" in warned[0]


# The model keeps nothing else


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_in_training_is_refused_by_name(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Identity(), kind(3))
    with pytest.raises(UnsupportedModelError, match="'1'"):
        require_no_batch_statistics(model)
    require_no_batch_statistics(model.eval())


def test_batch_norm_without_running_statistics_is_refused_in_evaluation_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    with pytest.raises(UnsupportedModelError, match="'0'"):
        require_no_batch_statistics(model)


def test_instance_norm_that_keeps_statistics_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="running statistics"):
        require_no_batch_statistics(nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True)))
    require_no_batch_statistics(nn.Sequential(nn.InstanceNorm1d(3, affine=True)))


@pytest.mark.parametrize("affine", ["batch norm's own", "a layer before"])
def test_functional_batch_norm_is_refused_by_the_graph(affine: str) -> None:
    """There is no module and no input with a gradient: only the node shows the use of batch statistics."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(3))})
    x = torch.randn(4, 3)
    normalized = (
        F.batch_norm(x, None, None, model["w"], None, training=True)
        if affine == "batch norm's own"
        else F.batch_norm(x * model["w"], None, None, training=True)
    )
    with pytest.raises(CoupledExamplesError):
        per_example_gradients(normalized.tanh().sum(1), trainable(model), Memory())


def test_an_embedding_scaled_by_frequency_is_refused() -> None:
    model = nn.Embedding(4, 3, scale_grad_by_freq=True)
    with pytest.raises(CoupledExamplesError, match="scale_grad_by_freq"):
        per_example_gradients(model(torch.tensor([[0, 1], [1, 1]])).flatten(1).sum(1), trainable(model), Memory())


class Leaky(nn.Module):
    """Stores a statistic of its input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 2), how
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("late", None)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.how == "in place":
            self.seen += mean
        elif self.how == "assigned":
            self.seen = self.seen + mean
        elif self.how == "through .data":
            self.seen.data.add_(mean)
        elif self.how == "late":
            self.late = mean
        elif self.how == "frozen parameter":
            with torch.no_grad():
                self.frozen += mean
        elif self.how == "trainable parameter":
            self.layer.weight.data.add_(mean)
        return self.layer(x)


@pytest.mark.parametrize(
    "how", ["in place", "assigned", "through .data", "late", "frozen parameter", "trainable parameter"]
)
def test_a_forward_pass_that_stores_statistics_is_refused(how: str) -> None:
    model = Leaky(how)
    guard = BufferGuard(Inventory(model))
    guard.remember()
    model(torch.randn(4, 3))
    with pytest.raises(UnsupportedModelError, match=r"(seen|late|frozen|layer\.weight)"):
        guard.compare()


def test_an_embedding_that_renormalizes_what_it_looks_up_is_refused() -> None:
    """max_norm rescales the rows of the ids that are in the batch, without any noise."""
    model = nn.Embedding(5, 3, max_norm=0.1)
    guard = BufferGuard(Inventory(model))
    guard.remember()
    model(torch.tensor([[1, 2]]))
    with pytest.raises(UnsupportedModelError, match="weight"):
        guard.compare()


def test_a_model_without_statistics_passes_repeatedly() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.GroupNorm(2, 4), nn.BatchNorm1d(4).eval())
    guard = BufferGuard(Inventory(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        guard.remember()
        model(torch.randn(4, 3)).sum().backward()
        guard.compare()
        optimizer.step()  # between two batches parameters do change
        optimizer.zero_grad()


def test_reentrant_checkpointing_is_refused() -> None:
    model = nn.Linear(3, 3)
    x = torch.randn(4, 3, requires_grad=True)
    hidden = torch.utils.checkpoint.checkpoint(model, model(x), use_reentrant=True)
    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        walk(hidden.sum(1), trainable(model))


def test_the_users_random_state_is_left_alone() -> None:
    """Otherwise a resumed run would draw other dropout masks than an uninterrupted one."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    per_example_gradients(losses(model, (x,)), trainable(model), Memory())
    by_loop(losses(model, (x,)), trainable(model))
    assert torch.equal(before, torch.get_rng_state())
