"""Attention on a GPU is not mistaken for coupling, and coupling is detected: `python -m tests.gpu.attention`.

Arguments select checks by name (published, exact, accepted, refused). Covers every attention kernel of torch, in
bfloat16 and in TF32, up to 24 layers and 4096 positions. Several kernels add atomically, so that two passes differ.
Networks without coupling must pass the independence probe and have per-example gradients. The probe must refuse
networks with a planted coupling of a hundredth or less.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipwise.errors import CoupledExamplesError
from clipwise.gradients import Memory, by_loop, per_example_gradients
from clipwise.validation.coupling import IndependenceProbe
from tests.gpu.verdicts import Verdicts, failures_of

DEVICE = torch.device("cuda")
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HALF_ONLY = ("flash", "cudnn")
SIZES = ((12, 1024, 8), (24, 1024, 16), (24, 4096, 4))  # layers, positions, examples
VOCABULARY = 512
ALL = ("published", "exact", "accepted", "refused")


class Block(nn.Module):
    """A layer of a small GPT. With `across`, attention treats the whole batch as one sequence."""

    def __init__(self, width: int, heads: int, apart: bool, across: bool) -> None:
        super().__init__()
        self.heads, self.across = heads, across
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # One projection for queries, keys and values; or three, where query rows can be pure rounding error.
        self.into = nn.ModuleList(nn.Linear(width, width if apart else 3 * width) for _ in range(3 if apart else 1))
        self.out, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        h = self.norm(x).reshape(1, B * T, width) if self.across else self.norm(x)
        qkv = torch.cat([layer(h) for layer in self.into], -1)
        q, k, v = qkv.view(*h.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """A language model. `leak` times the batch's mean is subtracted after one of its layers."""

    def __init__(
        self, layers: int, *, apart: bool = False, leak: float = 0.0, leaks_at: int = 0, across: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, heads = 128, 2
        self.leak, self.leaks_at = leak, leaks_at
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(4096, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, apart, across and number == leaks_at) for number in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.leak and number == self.leaks_at:
                x = x - self.leak * x.mean(0)
        out: Tensor = self.head(self.norm(x))
        return out


def losses_of(model: nn.Module, ids: Tensor, kernel: str, arithmetic: str) -> Tensor:
    """The mean loss over the positions of each example."""
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    autocast: AbstractContextManager[object] = nullcontext()
    if arithmetic == "bf16":
        autocast = torch.autocast("cuda", torch.bfloat16)
    with sdpa_kernel(KERNELS[kernel]), autocast:
        out = model(ids)
    scores = getattr(out, "logits", out)[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(scores, ids[:, 1:].flatten(), reduction="none").view(len(ids), -1).mean(1)


def batch(positions: int, examples: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (examples, positions), generator=generator).to(DEVICE)


def probe_refuses(model: nn.Module, ids: Tensor, kernel: str, arithmetic: str) -> bool:
    """Whether the checks of a run on its first batch refuse the model."""
    probe = IndependenceProbe()
    probe.mark(ids)
    try:
        probe.examine(losses_of(model, ids, kernel, arithmetic))
    except CoupledExamplesError:
        return True
    return False


def has_gradients(model: nn.Module, ids: Tensor, kernel: str, arithmetic: str) -> bool:
    """Whether examples are separated at every use."""
    losses = losses_of(model, ids, kernel, arithmetic)
    try:
        found = per_example_gradients(losses, dict(model.named_parameters()), Memory(), "reweight").squared_norms()
    except CoupledExamplesError as refusal:
        print(str(refusal)[:150], flush=True)
        return False
    return bool(torch.isfinite(torch.stack(list(found.values()))).all())


def kinds() -> Iterator[tuple[str, str]]:
    for kernel in KERNELS:
        yield kernel, "bf16"
        if kernel not in HALF_ONLY:
            yield kernel, "tf32"


def accepted() -> Verdicts:
    """Networks without coupling pass the probe and have layouts; repeated, because weights are random."""
    for kernel, arithmetic in kinds():
        for layers, positions, examples in SIZES:
            for apart in (False, True) if layers == 12 else (True,):
                model = SmallGPT(layers, apart=apart).to(DEVICE)
                what = f"{kernel} {arithmetic} {layers} layers T={positions} B={examples} apart={apart}"
                for seed in range(2):
                    ids = batch(positions, examples, seed)
                    yield f"{what}: the probe", not probe_refuses(model, ids, kernel, arithmetic)
                    losses = losses_of(model, ids, kernel, arithmetic)
                    found = per_example_gradients(losses, dict(model.named_parameters()), Memory(), "reweight")
                    yield f"{what}: uses", bool(torch.isfinite(sum(found.squared_norms().values())).all())


def exact() -> Verdicts:
    """Norms equal those of plain autograd, up to the rounding of the passes."""
    for kernel, arithmetic in kinds():
        model, ids = SmallGPT(4, apart=True).to(DEVICE), batch(1024, 4)
        parameters, memory = dict(model.named_parameters()), Memory()
        norms = []
        for method in (per_example_gradients, None):
            losses = losses_of(model, ids, kernel, arithmetic)
            found = method(losses, parameters, memory) if method else by_loop(losses, parameters)
            norms.append(torch.stack(list(found.squared_norms().values())).sum(0).sqrt())
        yield f"{kernel} {arithmetic}: norms", bool(torch.allclose(*norms, rtol=2e-2))


def refused() -> Verdicts:
    """Planted couplings, early and late; also with few examples."""
    for kernel, arithmetic in kinds():
        for layers, positions, examples in ((12, 1024, 8), (24, 1024, 2), (24, 1024, 32)):
            ids = batch(positions, examples)
            for leaks_at in (0, layers - 1):
                plants = {"attention across the batch": {"across": True}}
                plants |= {f"{leak} of the mean": {"leak": leak} for leak in (1.0, 0.1, 0.01)}
                if examples <= 8:
                    plants["0.001 of the mean"] = {"leak": 1e-3}
                for name, plant in plants.items():
                    if "across" in plant and examples == 32 and kernel == "math":
                        continue  # scores of the whole batch would exceed the memory
                    model = SmallGPT(layers, leaks_at=leaks_at, **plant).to(DEVICE)  # type: ignore[arg-type]
                    what = f"{name} at layer {leaks_at} of {layers}, {kernel} {arithmetic} B={examples}"
                    yield what, probe_refuses(model, ids, kernel, arithmetic)


def published() -> Verdicts:
    """GPT-2 from transformers, if installed, with 12 layers and 1024 positions."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = GPT2LMHeadModel(config).to(DEVICE)
    for seed, examples in enumerate((8, 4, 6)):
        ids = batch(1024, examples, seed)
        yield f"GPT-2 B={examples}: the probe", not probe_refuses(model, ids, "flash", "bf16")
        yield f"GPT-2 B={examples}: uses", has_gradients(model, ids, "flash", "bf16")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    checks = [check for check in (published, exact, accepted, refused) if check.__name__ in (sys.argv[1:] or ALL)]
    sys.exit(1 if sum(failures_of([check]) for check in checks) else 0)  # sequential, to show progress
