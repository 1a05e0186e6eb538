"""The GPU code paths for gradients, run on a CPU with the kernels' twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clipwise import kernels
from clipwise.gradients import Memory, forms, per_example_gradients, stream
from clipwise.gradients.forms import Permuted, Windows
from clipwise.gradients.precision import TF32
from clipwise.gradients.rules import convolution
from tests.gradients.cases import CASES, Case, losses, oracle, trainable

BATCH = 5
NAMES = ("linear", "linear positions", "linear gram", "linear time first", "embedding padding", "layer norm",
         "group norm", "twice", "tied", "Conv2d of few positions {'kernel_size': 3, 'padding': 1}")  # fmt: skip
CONVOLUTIONS = [c for c in CASES if c.name.startswith("Conv") and "padding_mode" not in c.name]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("usable", "supported"):
        monkeypatch.setattr(kernels, name, lambda t: True)
    monkeypatch.setattr(forms.base, "_KERNELS_ON_CPU", True)
    monkeypatch.setattr(stream.Stream, "is_on_cuda", True)
    # Rows of any length are padded, as for a vocabulary.
    monkeypatch.setattr(forms.outer, "_aligned", lambda x: F.pad(x, (0, -x.shape[-1] % 64)))


def require_exact(case: Case, methods: tuple[str, ...] = ("bookkeeping", "reweight")) -> None:
    """Norms are close upper bounds; sums are exact, with a weight of 0 for some examples."""
    model, inputs = case.build(torch.float32), case.draw(BATCH, torch.float32)
    truth = oracle(case.build(torch.float32), inputs)
    w_B = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25], dtype=torch.float64)
    for method in methods:
        memory = Memory()
        # "reweight" makes both passes once the graph is known.
        for _ in range(3 if method == "reweight" else 1):
            found = per_example_gradients(losses(model, inputs), trainable(model), memory, method)
            squares = found.squared_norms()
            sums = found.weighted_sums(dict.fromkeys(squares, w_B))
        for name, g in truth.items():
            norm_B = g.flatten(1).norm(dim=1)
            assert bool((squares[name].sqrt() >= norm_B * (1 - 1e-5)).all()), (method, name)
            torch.testing.assert_close(squares[name].sqrt(), norm_B, rtol=1e-3, atol=1e-5)
            expected = torch.tensordot(w_B, g, 1)
            torch.testing.assert_close(sums[name].double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_sums(name: str) -> None:
    require_exact(next(case for case in CASES if case.name == name))


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: case.name)
def test_convolutions_by_every_form(case: Case, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[type] = set()
    form_on_cuda = convolution._form_on_cuda

    def noted(*operands: object) -> forms.Form:
        form = form_on_cuda(*operands)  # type: ignore[arg-type]
        kinds.add(type(form))
        return form

    monkeypatch.setattr(convolution, "gram_pays_on_cuda", lambda *_: pays)
    monkeypatch.setattr(convolution, "_form_on_cuda", noted)
    require_exact(case, ("bookkeeping",))
    assert kinds <= {Windows if pays else Permuted, forms.Outer}
    assert bool(kinds) == ("groups" not in case.name)  # groups use the same form on all devices


def test_an_operand_stays_in_bfloat16_and_its_sum_within_the_stated_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the scaled operand is rounded, by at most the error of the arithmetic."""

    def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return a.to(dtype) @ b.to(dtype)

    monkeypatch.setattr(forms.outer, "_product", product)
    torch.manual_seed(0)
    for positions in (1, 2, 9):
        left, right = (torch.randn(BATCH, positions, n).bfloat16() for n in (40, 30))
        outer = forms.Outer(left, right)
        outer.left, outer.right = left, right  # as on a GPU
        norm_B = forms.measured(outer, forms.Budget(0, TF32)).sqrt()
        assert outer.squared_error_B is not None
        bound_B = torch.maximum(norm_B, (norm_B + outer.squared_error_B.sqrt()) / (1 + TF32.slack))
        for i in range(BATCH):
            w_B = torch.zeros(BATCH)
            w_B[i] = 0.7 / bound_B[i]
            assert float(outer.weighted_sum(w_B).double().norm()) <= 0.7 * (1 + TF32.slack)
