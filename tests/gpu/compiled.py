"""Compiled steps on a GPU, without pytest: `python -m tests.gpu.compiled [--backend NAME] [--rehearse]`.

Compares compiled steps with ordinary ones: the same sums for several models, samplings, optimizers and sizes, for
per-example, batch and backpropagation clipping, also with changing bounds; the same noise from the same key, new noise
at each step, with the stated size; non-finite examples; dropout, views and autocast; and sums in TensorFloat-32 within
the stated sensitivity where positions cancel. Exit code 1 if anything fails.

--backend is that of `private.compiled`: "inductor" (the default), or "cudagraphs" for steps captured without Inductor.
Inductor compiles each graph, so with it the checks that repeat a graph are left out, unless --all is given.
--rehearse runs on a CPU, with a repeated function call in place of a graph, IEEE in place of TF32, and "aot_eager" in
place of "inductor".
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Backprop, Batch, PerExample, Private, layers, make_private
from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.policies import Adaptive
from clipwise.clipping.public import PublicData
from clipwise.engine import compiled, cuda_graphs
from clipwise.engine.captured import Captured
from clipwise.engine.compiled import CaptureWarning, CompiledStep
from clipwise.gradients.forms import Budget, Outer, Rows, Tied
from clipwise.gradients.precision import TF32
from tests.gpu.verdicts import Verdicts, failures_of
from tests.soundness.neighbours import attach

REHEARSED = "--rehearse" in sys.argv[1:]
DEVICE = "cpu" if REHEARSED else "cuda"
BACKEND = sys.argv[sys.argv.index("--backend") + 1] if "--backend" in sys.argv else "inductor"
IS_TRACED = BACKEND != "cudagraphs"
if REHEARSED and BACKEND == "inductor":
    BACKEND = "aot_eager"
SIZE, BATCH, CLASSES, VOCABULARY = 160, 16, 5, 40
UPDATES = 14  # four ordinary ones, some that are compared, then captured ones; the update is captured a few later
TOLERANCE = 1e-3  # relative to the change of the parameters in training
IN_HALF = 5e-2  # the same under autocast to bfloat16
STATED = 1 + TF32.slack
SLACK = 1 + 1e-4
PLENTY = 2**34


# Models


class Recurrent(nn.Module):
    """A classifier on the last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Language(nn.Module):
    """One block of attention, with the head tied to the table."""

    def __init__(self, width: int = 32, heads: int = 4, positions: int = 12) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, ids: Tensor) -> Tensor:
        B, T = ids.shape
        x = self.table(ids) + self.places(torch.arange(T, device=ids.device))
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(heard)
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return x @ self.table.weight.T


class Untied(nn.Module):
    """A table, one of torch's attention layers, and a separate head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.table(ids)))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2),
        nn.GroupNorm(4, 24),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )


def with_same_padding() -> nn.Module:
    """Even kernels, which pad on one side only; no bias; pooling with odd sizes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 2, padding="same", bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 16, 2, padding="same"),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 36, CLASSES, bias=False),
    )


def coupled() -> nn.Module:
    """With batch norm, and weights in the channels-last format."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 25, CLASSES),
    )
    layers.without_running_statistics(model)
    return model.to(memory_format=torch.channels_last)


# (model, one record)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (30,)),
    "convolutional": (convolutional, (3, 12, 12)),
    "same padding": (with_same_padding, (3, 12, 12)),
    "recurrent": (Recurrent, (10, 8)),
    "language": (Language, (12,)),
    "untied": (Untied, (12,)),
    "coupled": (coupled, (3, 12, 12)),
}


def records(name: str) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    shape = MODELS[name][1]
    if name in ("language", "untied"):
        x = torch.randint(0, VOCABULARY, (SIZE, *shape), generator=random)
        return TensorDataset(x, x.roll(-1, 1))
    return TensorDataset(
        torch.randn(SIZE, *shape, generator=random) * 2, torch.randint(0, CLASSES, (SIZE,), generator=random)
    )


def loss_with(model: nn.Module, in_half: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """The cross entropy of each example: the mean over its positions, if it has several."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=in_half):
            scores = model(x)
        scores = scores.float() if in_half else scores
        found = F.cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="none")
        return found.view(len(x), y.shape[1:].numel()).mean(1)

    return loss


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().to(DEVICE)
    with torch.no_grad():
        model(records(name).tensors[0][:2].to(DEVICE))  # initialises the sizes of lazy layers
    return model


# Runs


class Recorded:
    """Replaces a CUDA graph on a CPU."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.replay = act


def recorded(act: Callable[[], Any], device: torch.device, warm: bool = True) -> Recorded:
    for _ in range(2 * warm):
        act()
    return Recorded(act)


def go(private: Private, step: Callable[..., bool], updates: int, after: Callable[[], object] | None = None) -> None:
    """Makes so many updates, in as many epochs as needed."""
    while updates > 0:
        for batch in private.loader.pieces():
            if step(*(t.to(DEVICE) for t in batch)):
                updates -= 1
                if after is not None:
                    after()
            if updates == 0:
                return


def run(
    name: str,
    is_compiled: bool,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    scheduled: bool = False,
    dataset: TensorDataset | None = None,
    size: int | None = None,
    clipped: Mapping[str, Any] | None = None,
    in_half: bool = False,
    **options: Any,
) -> tuple[nn.Module, CompiledStep | None]:
    """Train one model; both kinds of steps see the same batches. `clipped`: the layers' mode, for Backprop."""
    model = build(name)
    if clipped is not None:
        model = layers.clip_inputs(model, **clipped)
        options["clipping"] = Backprop()
    own = torch.optim.SGD(model.parameters(), 0.2) if optimizer is None else optimizer(model)
    defaults = {"noise_multiplier": 0, "batch_size": BATCH, "clipping": PerExample(1.0), "seed": 3}
    private = make_private(model, own, dataset or records(name), **(defaults | options))
    schedule = torch.optim.lr_scheduler.StepLR(own, 6, 0.5) if scheduled else None
    loss = loss_with(model, in_half)
    step = private.compiled(loss, size, BACKEND) if is_compiled else None
    ordinary: Callable[..., bool] = lambda *batch: private.step(loss(*batch))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        go(private, step or ordinary, UPDATES, schedule.step if schedule else None)
    return model, step


def difference(name: str, **options: Any) -> tuple[float, CompiledStep]:
    """The distance between compiled and ordinary results, relative to the change of the ordinary ones in training."""
    (model, step), (expected, _) = (run(name, is_compiled, **options) for is_compiled in (True, False))
    assert step is not None
    ours, theirs, start = (
        torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (model, expected, build(name))
    )
    return float((ours - theirs).norm() / (theirs - start).norm()), step


def compared(what: str, name: str, updates_too: bool = True, **options: Any) -> Verdicts:
    found, step = difference(name, **options)
    limit = IN_HALF if options.get("in_half") else TOLERANCE
    yield f"{what}: compiled steps end {found:.1e} away", found <= limit
    yield f"{what}: it was not captured", isinstance(step._captured, Captured)
    yield f"{what}: it was not traced", (step._traced is not None) == (IS_TRACED and "clipped" not in options)
    if updates_too:
        yield (
            f"{what}: the update was not captured",
            isinstance(step._captured, Captured) and step._captured._update._graph is not None,
        )


# Checks


def check_models() -> Verdicts:
    """Poisson batches of all sizes, padded to one size."""
    for name in MODELS:
        if name != "coupled":
            yield from compared(name, name)


def check_sizes() -> Verdicts:
    """In pieces, by the captured step's size, by the loader's, and by both; and other samplings."""
    for size, physical in ((2, None), (7, None), (200, None), (None, 9), (4, 9)):
        what = f"pieces of {size}, physical {physical}"
        yield from compared(what, "perceptron", size=size, max_physical_batch_size=physical)
    for sampling in ("fixed-size", "shuffled"):
        yield from compared(sampling, "perceptron", sampling=sampling)
    yield from compared("rare and empty draws", "perceptron", batch_size=2)
    yield from compared("parts", "convolutional", clipping=PerExample(1.0, parts="layer", method="bookkeeping"))
    yield from compared("two passes", "perceptron", clipping=PerExample(1.0, method="reweight"))


def check_optimizers() -> Verdicts:
    """With state on the device, and a learning rate that a scheduler changes."""
    optimizers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9, weight_decay=0.01),
        "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01, capturable=not REHEARSED),
        "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.003),
    }
    for name, optimizer in optimizers.items():
        for scheduled in (False, True):
            what = f"{name}, scheduled {scheduled}"
            kept = name == "RMSprop" or scheduled or (name == "Adam" and REHEARSED)
            yield from compared(what, "perceptron", updates_too=not kept, optimizer=optimizer, scheduled=scheduled)


def check_not_finite() -> Verdicts:
    """An example that is not finite adds nothing, in any batch."""
    for value in (math.nan, math.inf):
        x, y = records("perceptron").tensors
        x = x.clone()
        x[::10] = value
        dataset = TensorDataset(x, y)
        # Traced sums are trusted, and so replayed, after batches without a rare case.
        yield from compared(f"{value}", "perceptron", not IS_TRACED, dataset=dataset)
        options: dict[str, Any] = {"dataset": dataset, "max_physical_batch_size": 5}
        yield from compared(f"{value} in pieces", "perceptron", **options)


def check_batch() -> Verdicts:
    """Batch clipping: microbatches of one size, by graphs; one that is not finite."""
    for sampling, microbatches, parts in (
        ("fixed-size", 1, "all"),
        ("fixed-size", 4, "tensor"),
        ("partition", 1, "layer"),
        ("shuffled", 1, "all"),
    ):
        what = f"batch, {sampling}, {microbatches} microbatches, {parts}"
        clipping = Batch(0.5, microbatches=microbatches, parts=parts)
        yield from compared(what, "coupled", sampling=sampling, clipping=clipping)
    x, y = records("coupled").tensors
    x = x.clone()
    x[17] = math.nan
    options: dict[str, Any] = {"sampling": "fixed-size", "clipping": Batch(0.5, microbatches=4)}
    yield from compared("batch, not finite", "coupled", dataset=TensorDataset(x, y), **options)


def check_lasting() -> Verdicts:
    """Bounds that change every seven releases: steps are captured again."""
    with mock.patch.object(compiled, "_LASTING", 7):
        for name, of in (("convolutional", "example"), ("coupled", "microbatch")):
            public = PublicData(
                records(name), lambda model, *batch: loss_with(model)(*(t.to(DEVICE) for t in batch)), name="others"
            )
            size = {"microbatch_size": 8} if of == "microbatch" else {}
            parts = Adaptive(public, groups="tensor", of=of, every=7, **size)
            for what, options in (
                ("measured", {"max_norm": 0.5, "parts": parts}),
                ("decaying", {"max_norm": NormDecay(0.5, 0.7, every=7)}),
            ):
                clipping = (Batch if of == "microbatch" else PerExample)(**options)
                yield from compared(
                    f"lasting, {name}, {what}", name, updates_too=False, sampling="fixed-size", clipping=clipping
                )


def check_backprop() -> Verdicts:
    """Backpropagation clipping: every bound and mode, sizes, examples that are not finite."""
    for name in ("perceptron", "convolutional", "same padding", "recurrent", "untied"):
        for mode in ("clip", "normalize"):
            for bound in ("upstream", "gradient"):
                clipped = {"input_norm": 2.0, "grad_norm": 0.5, "mode": mode, "bound": bound}
                yield from compared(f"backprop, {name}, {mode}, {bound}", name, clipped=clipped)
    clipped = {"input_norm": 2.0, "grad_norm": 0.5}
    for size, physical in ((2, None), (200, None), (4, 9)):
        what = f"backprop, pieces of {size}, physical {physical}"
        options: dict[str, Any] = {"size": size, "max_physical_batch_size": physical, "clipped": clipped}
        yield from compared(what, "same padding", **options)
    yield from compared("backprop, rare and empty draws", "perceptron", batch_size=2, clipped=clipped)
    for name in ("perceptron", "same padding"):
        x, y = records(name).tensors
        x = x.clone()
        x[::10] = math.nan
        dataset = TensorDataset(x, y)
        yield from compared(f"backprop, {name}, not finite", name, dataset=dataset, clipped=clipped)


def check_noise() -> Verdicts:
    """The noise is that of the key, with a new key at each step, and of the stated size."""
    if not REHEARSED:  # a CPU uses another generator
        yield from compared("noise", "perceptron", noise_multiplier=0.5)
        yield from compared(
            "noise of parts", "convolutional", noise_multiplier=0.5, clipping=PerExample(1.0, parts="layer")
        )
    model = build("perceptron")
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        records("perceptron"),
        noise_multiplier=1e5,  # makes the clipped sum negligible
        batch_size=BATCH,
        clipping=PerExample(1.0),
    )
    step = private.compiled(loss_with(model), None, BACKEND)
    go(private, step, 6)
    (part,) = private.parts()
    draws: list[Tensor] = []
    parameters = list(model.parameters())
    go(
        private,
        step,
        8,
        lambda: draws.append(torch.cat([p.grad.double().flatten() for p in parameters]) * BATCH / part.noise_std),
    )
    noise_SN = torch.stack(draws)
    S, N = noise_SN.shape
    for name, value, error in (
        ("mean", float(noise_SN.mean()), 1 / math.sqrt(S * N)),
        ("square less 1", float(noise_SN.square().mean() - 1), math.sqrt(2 / (S * N))),
    ):
        yield f"noise: {name} is {value:.2g}", abs(value) < 5 * error
    correlation = float((torch.corrcoef(noise_SN) - torch.eye(S, device=DEVICE)).abs().max())
    yield f"noise: steps are correlated by {correlation:.2g}", correlation < 6 / math.sqrt(N)
    yield "noise: a number came twice", len(torch.unique(noise_SN)) > 0.999 * S * N
    yield "noise: steps are not counted", private.steps == 14


class Given(nn.Module):
    """Its gradient is sum_t g_t x_t^T, for any rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return (self.a(x) * g).flatten(1).sum(1)


def cancelling(T: int, m: int, n: int, left_over: float) -> tuple[Tensor, Tensor]:
    """Two examples: pairs of positions that cancel up to a share, all truncated differently; and one with sum 0.

    The losses of both have a gradient at the inputs; otherwise the probe would not settle, and no step be captured.
    """
    left, right = torch.randn(T // 2, m), torch.randn(T // 2, n)
    spread = 1 + torch.rand(T // 2, 1)
    x = torch.cat([left, left * spread])
    g = torch.cat([right, -right / spread * (1 + left_over * torch.randn_like(right))])
    return torch.stack([x, 0 * x]).to(DEVICE) * 1e4, torch.stack([g, g]).to(DEVICE)


def check_tf32() -> Verdicts:
    """The contribution of one example in TensorFloat-32 stays within the stated sensitivity."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield from _tf32()
    finally:
        torch.set_float32_matmul_precision(before)


def _tf32() -> Verdicts:
    norm = 0.01
    for T, m, n in ((8, 64, 48), (64, 256, 512), (256, 768, 768)):
        for left_over in (0.0, 1e-4, 1e-2, 1.0):
            torch.manual_seed(0)
            model, rows = Given(m, n).to(DEVICE), cancelling(T, m, n, left_over)
            for method in ("bookkeeping", "reweight"):
                clipper = attach(model, PerExample(norm, method=method, matmul_precision="tf32"))
                found = float(clipper.clipped_sum(model(*rows))["a.weight"].double().norm())
                what = f"tf32 {method} {(T, m, n)} left over {left_over}: {found / norm:.4f} C"
                yield what, clipper.bounds[0].sensitivity == norm * STATED and found <= norm * STATED * SLACK
    for arithmetic, stated in (("tf32", STATED), ("ieee", 1.0)):  # IEEE sums in a step whose forward pass is in TF32
        yield from _tf32_compiled(norm, arithmetic, stated)
    yield from _tf32_tied()


def _tf32_compiled(norm: float, arithmetic: str, stated: float) -> Verdicts:
    """The same through whole steps: the gradient of a full batch, times its size, is the sum."""
    torch.manual_seed(0)
    model, rows = Given(256, 512).to(DEVICE), cancelling(64, 256, 512, 1e-2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    clipping = PerExample(norm, matmul_precision=arithmetic)
    private = make_private(
        model, optimizer, TensorDataset(*rows), sampling="full", noise_multiplier=0, clipping=clipping
    )
    step = private.compiled(model, None, BACKEND)
    sums: list[float] = []
    go(private, step, 9, lambda: sums.append(float(model.a.weight.grad.double().norm()) * 2))
    yield f"tf32 compiled, {arithmetic}: it was not captured", step._captured is not None
    (part,) = private.parts()
    yield f"tf32 compiled, {arithmetic}: stated sensitivity", part.sensitivity == norm * stated
    yield f"tf32 compiled, {arithmetic}: {max(sums) / norm:.4f} C", max(sums) <= part.sensitivity * SLACK


def _tf32_tied() -> Verdicts:
    """A product, and a row that cancels all but a share of it: a tied table."""
    T, V, n = 16, 64, 64
    loses_most = 1 + 2.0**-10 - 2.0**-23  # truncated to 1
    for share in (0.0, 2.0**-9, 2.0**-6, 2.0**-5, 2.0**-4, 0.2, 1.0):
        left = torch.zeros(1, T, V, device=DEVICE)
        left[..., 0] = loses_most
        right = torch.full((1, T, n), loses_most * 1024, device=DEVICE)
        row = -(1 - share) * (left[0, :, 0].double() @ right[0].double()).float()[None]
        entry = torch.zeros(1, dtype=torch.long, device=DEVICE)
        form = Tied(Outer(left, right), Rows(entry, entry, row, 1, torch.Size((V, n)), 1))
        with TF32.products():
            norm_B = form.squared_norms(Budget(PLENTY, TF32)).sqrt()
            assert form.squared_error_B is not None
            bound_B = torch.maximum(norm_B, (norm_B + form.squared_error_B.sqrt()) / STATED)
            found = float(form.weighted_sum((1 / bound_B).clamp(max=1)).double().norm())
        yield f"tf32 tied, share {share:.3g}: {found:.4f} C", found <= STATED * SLACK


def check_in_half() -> Verdicts:
    """Under autocast to bfloat16."""
    for name in ("perceptron", "convolutional", "language", "untied"):
        yield from compared(f"bfloat16, {name}", name, in_half=True)


def check_views() -> Verdicts:
    """Several views of each example, whole and in pieces."""
    for physical in (None, 5):
        options: dict[str, Any] = {"augmentation_multiplicity": 3, "max_physical_batch_size": physical}
        yield from compared(f"views, physical {physical}", "convolutional", **options)


def check_dropout() -> Verdicts:
    """A replayed step draws new masks at each step, from the key of the run."""
    if not IS_TRACED:
        return
    sums: list[list[float]] = []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 64), nn.Dropout(0.5), nn.Linear(64, CLASSES)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        options: dict[str, Any] = {"sampling": "full", "noise_multiplier": 0, "seed": 3}
        private = make_private(model, optimizer, records("perceptron"), clipping=PerExample(1.0), **options)
        step = private.compiled(loss_with(model), None, BACKEND)
        go(private, step, 8)
        torch.manual_seed(seed)
        found: list[float] = []
        go(private, step, 5, lambda: found.append(float(model[0].weight.grad.double().norm())))
        yield "dropout: it was not captured", step._captured is not None
        yield "dropout: masks repeat", len(set(found)) == len(found)
        sums.append(found)
    yield "dropout: torch's seed changes the masks", sums[0] == sums[1]


def check_fallback() -> Verdicts:
    """A loss that reads a value cannot be traced or captured. It warns with the reason, and trains."""
    model = build("perceptron")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = make_private(model, optimizer, records("perceptron"), noise_multiplier=0, batch_size=BATCH)
    plain = loss_with(model)
    step = private.compiled(lambda x, y: plain(x, y) * (1.0 if float(x.sum()) > -1e9 else 2.0), None, BACKEND)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go(private, step, UPDATES)
    reasons = [str(w.message) for w in caught if w.category is CaptureWarning]
    yield f"fallback: {len(reasons)} warnings", len(reasons) == (1 if REHEARSED else 1 + IS_TRACED)
    yield "fallback: no reason", not IS_TRACED or "reads a value" in reasons[0]
    yield "fallback: steps are missing", private.steps == UPDATES


def check_resumed() -> Verdicts:
    """After the optimizer's state was loaded, the captured update uses the new state."""
    ends = []
    for is_compiled in (True, False):
        model = build("perceptron")
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        private = make_private(model, optimizer, records("perceptron"), sampling="full", noise_multiplier=0, seed=1)
        loss = loss_with(model)
        step: Callable[..., bool] = lambda *batch: private.step(loss(*batch))  # noqa: E731
        if is_compiled:
            step = private.compiled(loss, None, BACKEND)
        go(private, step, 9)
        state = copy.deepcopy(optimizer.state_dict())
        go(private, step, 3)
        optimizer.load_state_dict(state)
        go(private, step, 6)
        ends.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().double().flatten() for p in build("perceptron").parameters()])
    found = float((ends[0] - ends[1]).norm() / (ends[1] - start).norm())
    yield f"resumed: compiled steps end {found:.1e} away", found <= TOLERANCE


CHECKS = (
    check_models,
    check_sizes,
    check_optimizers,
    check_not_finite,
    check_batch,
    check_lasting,
    check_backprop,
    check_noise,
    check_tf32,
    check_resumed,
    check_in_half,
    check_views,
    check_dropout,
    check_fallback,
)
# Each comparison of these is a graph of its own, which takes Inductor up to a minute.
REPEATED = (check_optimizers, check_lasting, check_backprop)


def main() -> int:
    checks = [c for c in CHECKS if "--all" in sys.argv or BACKEND != "inductor" or c not in REPEATED]
    if REHEARSED:
        can = mock.patch.object(compiled, "_can_capture", lambda device: True)
        with can, mock.patch.object(cuda_graphs, "capture", recorded):
            return 1 if failures_of(checks) else 0
    if not torch.cuda.is_available():
        print("there is no CUDA device")
        return 1
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return 1 if failures_of(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
