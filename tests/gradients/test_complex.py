"""Complex arithmetic, with real and complex parameters, against a separate forward pass for each example."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipwise.gradients import METHODS, FallbackWarning, Memory, per_example_gradients
from tests.gradients.cases import losses, oracle, trainable

BATCH, C, N = 6, 3, 8


def complex_normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex128)


class Spectral(nn.Module):
    """A Fourier layer: products of the lowest frequencies with complex weights, and a parallel linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, modes = kind, 3
        if kind == "pairs":
            self.weight = nn.Parameter(torch.randn(C, C, modes, 2))
        elif kind == "complex":
            self.weight = nn.Parameter(complex_normal(C, C, modes))
        else:
            self.re, self.im = (nn.Parameter(torch.randn(C, C, modes)) for _ in range(2))
        self.beside = nn.Conv1d(C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pairs":
            weight = torch.view_as_complex(self.weight)
        else:
            weight = self.weight if self.kind == "complex" else torch.complex(self.re, self.im)
        x_ft = torch.fft.rfft(x)
        out = torch.zeros_like(x_ft)
        out[:, :, :3] = torch.einsum("bix,iox->box", x_ft[:, :, :3], weight)
        return torch.fft.irfft(out, n=x.shape[-1]) + self.beside(x)


class StateSpace(nn.Module):
    """S4D: a convolution kernel made of complex exponentials of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.C = nn.Parameter(torch.randn(C, 4, 2))
        self.log_dt, self.log_decay = nn.Parameter(torch.rand(C) - 3), nn.Parameter(torch.rand(C, 4))
        self.frequency, self.D = nn.Parameter(torch.randn(C, 4)), nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        A = -self.log_decay.exp() + 1j * self.frequency
        step = A * self.log_dt.exp()[:, None]
        powers = (step[..., None] * torch.arange(length)).exp()
        scaled = torch.view_as_complex(self.C) * (step.exp() - 1) / A
        kernel = 2 * torch.einsum("hn,hnl->hl", scaled, powers).real
        k_f, x_f = torch.fft.rfft(kernel, n=2 * length), torch.fft.rfft(x, n=2 * length)
        return torch.fft.irfft(x_f * k_f, n=2 * length)[..., :length] + x * self.D[:, None]


class Elementwise(nn.Module):
    """Sums, products, quotients and `where` of real and complex operands; magnitudes and angles of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(N)) for _ in range(3))
        self.z, self.w = nn.Parameter(complex_normal(N)), nn.Parameter(complex_normal(1, N))
        self.scalar = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.complex(x, x.flip(-1) + 2)
        h = h * self.a + self.z / h + h / (self.w + 3) - self.b * 2j
        h = torch.where(x > 0, h * self.scalar, self.c.to(h.dtype) * h) + torch.polar(self.a.exp(), self.b)
        h = h + self.z.conj() * h + self.w.expand(len(x), C, N) + self.w.masked_fill(x > 1, 0)
        return torch.cat([h.abs(), (h + 5).angle(), h.real * h.imag], -1)


class Matrices(nn.Module):
    """Matrix products with complex matrices: unitary, transposed, shared, cast from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(complex_normal(N, 4)), nn.Parameter(complex_normal(4, N))
        self.real, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(complex_normal(4))
        self.linear = nn.Linear(4, 5, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.complex128) @ self.u + torch.complex(x, x) @ self.v.mH
        h = torch.addmm(self.bias, h.flatten(0, 1), self.real.to(h.dtype), alpha=2, beta=0.5j).view(h.shape)
        h = h @ self.v @ self.u + (self.u.T @ torch.complex(x.mT, x.mT**2)).mT
        return torch.view_as_real(self.linear(h)).flatten(1)


class Few(nn.Module):
    """The network in a branch that only examples with a large first number take."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        taken_B1 = (x[:, 0, :1] > 1).to(x)
        return torch.cat([(1 - taken_B1) * (x * self.scale).flatten(1), taken_B1 * self.inner(x).flatten(1)], 1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "fourier, pairs": lambda: Spectral("pairs"),
    "fourier, complex": lambda: Spectral("complex"),
    "fourier, re and im": lambda: Spectral("re and im"),
    "state space": StateSpace,
    "elementwise": Elementwise,
    "matrices": Matrices,
}


def build(name: str, few: bool) -> nn.Module:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Few(NETWORKS[name]()) if few else NETWORKS[name]()
    finally:
        torch.set_default_dtype(default)


def rows(taken: int, seed: int) -> tuple[Tensor]:
    x = torch.randn(BATCH, C, N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).clamp(max=0.9)
    x[1 : 1 + taken, 0, 0] = 1.5
    return (x,)


def require_exact(model: nn.Module, inputs: tuple[Tensor], memory: Memory, method: str) -> None:
    w_B = torch.linspace(-0.5, 2, BATCH, dtype=torch.float64)
    truth = oracle(model, inputs)
    found = per_example_gradients(losses(model, inputs), trainable(model), memory, method)
    squares = found.squared_norms()
    sums = found.weighted_sums(dict.fromkeys(truth, w_B))
    for name, g in truth.items():
        torch.testing.assert_close(squares[name], g.abs().reshape(BATCH, -1).square().sum(1), rtol=1e-8, atol=1e-20)
        torch.testing.assert_close(sums[name], torch.tensordot(w_B.to(g.dtype), g, 1), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_norms_and_sums_are_exact(name: str, few: bool, method: str) -> None:
    model, memory = build(name, few), Memory()
    for seed, taken in enumerate((1, 0, 0, 2)):
        require_exact(model, rows(taken, seed), memory, method)


@pytest.mark.filterwarnings("error::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_no_operation_uses_the_fallback(name: str) -> None:
    require_exact(build(name, False), rows(0, 0), Memory(), "bookkeeping")


class Lookup(nn.Module):
    """A lookup in a complex table, which has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(complex_normal(4, N))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.view_as_real(self.table[ids] * (1 + 2j)).flatten(1)


def test_an_operation_without_a_rule_for_complex_numbers_is_exact_as_well() -> None:
    torch.manual_seed(0)
    model = Lookup()
    with pytest.warns(FallbackWarning):
        require_exact(model, (torch.randint(0, 4, (BATCH, 5)),), Memory(), "bookkeeping")
