"""No message of a private run reveals the realised batch size or another shape of a batch."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise import Backprop, Batch, Lipschitz, PerExample, Private, layers, lipschitz
from clipwise.errors import ClipwiseError
from clipwise.sampling import augmentation
from clipwise.sampling.schemes import Poisson
from tests.runs import network, private_run

ROWS, FEATURES, CLASSES, RECORDS = 37, 5, 3, 101
SECRET = re.compile(rf"\b({ROWS}|{ROWS + 1}|{ROWS - 1}|{2 * ROWS}|{ROWS * ROWS}|{ROWS * FEATURES})\b")


@pytest.fixture(autouse=True)
def _draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poisson, "draw", lambda *_: np.arange(ROWS, dtype=np.int64))


def records(images: bool = False) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, *((1, 6, 6) if images else (FEATURES,)), generator=random)
    return TensorDataset(x, torch.randint(0, CLASSES, (RECORDS,), generator=random))


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


# Wrong steps, from the losses, outputs, inputs and targets of a batch.
WRONG: dict[str, Callable[[Private, Tensor, Tensor, Tensor, Tensor], Any]] = {
    "a mean": lambda p, each, o, x, y: p.step(each.mean()),
    "two dimensions": lambda p, each, o, x, y: p.step(each[:, None]),
    "pairs": lambda p, each, o, x, y: p.step(each[:, None] - each),
    "hidden pairs": lambda p, each, o, x, y: p.step((o[:, :1] - y).square().sum(1)),
    "one more": lambda p, each, o, x, y: p.step(torch.cat([each, each[:1]])),
    "one less": lambda p, each, o, x, y: p.step(each[1:]),
    "twice": lambda p, each, o, x, y: p.step(torch.cat([each, each])),
    "a list": lambda p, each, o, x, y: p.step(each.tolist()),
    "detached": lambda p, each, o, x, y: p.step(each.detach()),
    "of inputs alone": lambda p, each, o, x, y: p.step(x.sum(1)),
    "integers": lambda p, each, o, x, y: p.step(y),
    "complex": lambda p, each, o, x, y: p.step(each + 1j),
    "minus the mean": lambda p, each, o, x, y: p.step(each - each.mean()),
    "sorted": lambda p, each, o, x, y: p.step(each.sort()[0]),
    "contrastive": lambda p, each, o, x, y: p.step(cross_entropy(o @ o.T, torch.arange(len(y)))),
    "over a count": lambda p, each, o, x, y: p.step(each / (y != 0).sum()),
    "one forward pass of two": lambda p, each, o, x, y: p.step(o.new_zeros(len(y), requires_grad=True) * 1),
    "another batch": lambda p, each, o, x, y: p.compiled(lambda *b: each)(x[1:], y),
    "step_local_update": lambda p, each, o, x, y: p.step_local_update((x, y)),
}


def refusals(act: Callable[[], Any]) -> list[str]:
    """Return the text of the error and of all warnings before it."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ClipwiseError) as error:
            act()
    return [str(error.value), *(str(w.message) for w in warned)]


def require_silent(messages: list[str]) -> None:
    for message in messages:
        assert not SECRET.search(message), message


STRATEGIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "per example": lambda: (network(), PerExample(1.0)),
    "by loop": lambda: (network(), PerExample(1.0, method="loop")),
    "backprop": lambda: (layers.clip_inputs(network(), input_norm=1.0), Backprop()),
    "lipschitz": lambda: (nn.Sequential(layers.ClipInput(1.0), network()), Lipschitz(1.0, 1.0)),
}


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", WRONG)
def test_wrong_losses(how: str, strategy: str, probe: bool) -> None:
    model, clipping = STRATEGIES[strategy]()
    _, private = private_run(model, dataset=records(), clipping=clipping, batch_size=20, probe_independence=probe)

    def act() -> None:
        for x, y in private.loader:
            outputs = model(x)
            given = {"outputs": outputs} if strategy == "lipschitz" else {}
            WRONG[how](_With(private, given), cross_entropy(outputs, y), outputs, x, y)  # type: ignore[arg-type]
            raise clipwise.errors.StepError("accepted")

    messages = refusals(act)
    assert not probe or "accepted" not in messages
    require_silent(messages)


class _With:
    """A run with a step that takes outputs as well."""

    def __init__(self, private: Private, given: dict[str, Any]) -> None:
        self._private, self._given = private, given

    def step(self, losses: Any) -> Any:
        return self._private.step(losses, **self._given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._private, name)


class Transposed(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.last = inside, nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inside(x.T).T)
        return out


class Learning(nn.Module):
    """Stores a statistic of each batch."""

    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self._keep, self.kept = nn.Linear(FEATURES, CLASSES), keep, None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self._keep(x.detach())
        out: Tensor = self.layer(x)
        return out


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Rows(nn.Module):
    """More rows than examples, in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).repeat(2, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "keeps a tensor": (lambda: Learning(lambda x: x.mean(0)), {}),
    "keeps a number": (lambda: Learning(lambda x: float(x.sum())), {}),
    "keeps a size": (lambda: Learning(len), {}),
    "keeps a shape": (lambda: Learning(lambda x: list(x.shape)), {}),
    "centred": (lambda: nn.Sequential(Centred(), network()), {}),
    "clipped rows": (
        lambda: nn.Sequential(Rows(), layers.clip_inputs(network(), input_norm=1.0)),
        {"clipping": Backprop()},
    ),
    "other axis": (lambda: Transposed(lipschitz_norm()), {}),
    "batch norm": (lambda: nn.Sequential(network(), nn.BatchNorm1d(CLASSES)), {}),
    "a crop": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)),
        {"augmentation": augmentation.Views(2, augmentation.Crop(40, padding=1)), "dataset": records(images=True)},
    ),
    "views": (network, {"augmentation_multiplicity": 2, "clipping": PerExample(1.0)}),
    "microbatches": (network, {"clipping": Batch(1.0)}),
}


def lipschitz_norm() -> nn.Module:
    return layers.BoundedLayerNorm((FEATURES,))


@pytest.mark.parametrize("how", MODELS)
def test_wrong_models(how: str) -> None:
    make, options = MODELS[how]

    def act() -> None:
        model, private = private_run(make(), **{"dataset": records(), "batch_size": 20, **options})
        for x, y in private.loader:
            losses = cross_entropy(model(x)[: len(y)], y)
            private.step(losses[1:] if how in ("views", "microbatches") else losses)
            raise clipwise.errors.StepError("accepted")

    messages = refusals(act)
    assert "accepted" not in messages
    require_silent(messages)


def test_losses_with_bounds() -> None:
    outputs, targets = torch.randn(ROWS, 1), torch.zeros(ROWS)
    for loss in (lipschitz.Huber(), lipschitz.Logistic()):
        require_silent(refusals(lambda loss=loss: loss(outputs, targets)))  # type: ignore[misc]


def test_records_of_different_shapes() -> None:
    uneven = [torch.zeros(n % 38 + 1) for n in range(RECORDS)]

    def act() -> None:
        _, private = private_run(dataset=uneven, batch_size=20)
        next(iter(private.loader))

    require_silent(refusals(act))


def test_errors_of_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.engine.compiled._can_capture", lambda device: True)

    def fails(*_: Any) -> None:
        raise RuntimeError(f"The size of tensor a ({ROWS}) must match the size of tensor b (3)")

    monkeypatch.setattr("clipwise.engine.compiled.Captured", fails)
    model, private = private_run(dataset=records(), batch_size=20)
    step = private.compiled(lambda x, y: cross_entropy(model(x), y))
    with pytest.warns(UserWarning, match="cannot be captured") as warned:
        for _ in range(4):
            for batch in private.loader:
                step(*batch)
    require_silent([str(w.message) for w in warned])


# Sources of the error texts

SOURCE = Path(clipwise.__file__).parent
PUBLIC = {  # of parameters, of configurations, of public rows
    *(
        "tuple(p.shape)",
        "tuple(average.shape)",
        "tuple(shape)",
        "self.normalized_shape",
        "self._input_shape",
        "input_shape",
    ),
    *("self._network.output_shape", "len(counts)", "len(found)", "len(expected)", "len(inputs)", "expected_size"),
    *("self.size", "self.rows", "rows", "microbatch_size", "batch_size", "self.batch_size", "self.dataset_size"),
    *("self.expected_size", "self.max_batch_size", "default_limit(self.dataset_size, self.sample_rate)"),
    *("1 / size", "len(arguments)", "self.memory", "tuple(self._averages[name].shape)"),
    *("len(sharded)", "p.device_mesh.size()"),
}
NOT_OF_RUNS = ("audit", "cli", "tune", "accounting", "recipes", "ledger", "report")


def test_no_error_text_uses_a_size() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] in NOT_OF_RUNS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_warning = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn")
            if not (isinstance(node, ast.Raise) or is_warning):
                continue
            fields = [ast.unparse(f.value) for f in ast.walk(node) if isinstance(f, ast.FormattedValue)]
            sizes = [f for f in fields if re.search(r"shape|size|len\(|numel|\brows?\b|\blen", f)]
            found += [f"{path.name}: {field}" for field in sizes if field not in PUBLIC]
    assert not found
