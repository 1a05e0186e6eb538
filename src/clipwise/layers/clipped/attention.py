"""Multi-head attention: the projections of queries, keys and values under one clip, that of the output under another.

Nothing else in it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.layers.clipped.layer import ClippedLayer, is_plain
from clipwise.layers.clipped.linear import Matrix
from clipwise.layers.clipped.maps import ClippedMap, MapRole
from clipwise.layers.clipped.projections import THIRDS, ClippedProjections
from clipwise.layers.clipped.scales import Constants, clipped_input


class ClippedAttention(ClippedLayer):
    """`nn.MultiheadAttention` with `batch_first=True`, its projections clipped."""

    layer: nn.MultiheadAttention
    batch_first = True
    # torch's encoder layers read the weights past this module where they think that they may. They may not.
    _qkv_same_embed_dim = False

    def __init__(
        self, layer: nn.MultiheadAttention, constants: Constants, uses: int = 1, name: str = ""
    ) -> None:
        super().__init__(layer, constants, uses, name)
        for is_there, what, instead in (
            (not layer.batch_first, "takes positions first", "build it with batch_first=True"),
            (
                not layer._qkv_same_embed_dim,
                "has keys or values of their own size",
                "leave kdim and vdim out",
            ),
            (layer.bias_k is not None, "has add_bias_kv set", "leave it out"),
            (layer.add_zero_attn, "has add_zero_attn set", "leave it out"),
        ):
            if is_there:
                raise UnsupportedModelError(f"Layer {name!r} (MultiheadAttention) {what}: {instead}.")

    def _take(self, constants: Constants) -> None:
        self._in = MapRole(self, constants, "projections", map=Matrix())
        self._out = MapRole(self, constants, "output", map=Matrix())

    @property
    def in_proj_bias(self) -> Tensor | None:
        """As torch's encoder layers ask for it."""
        return self.layer.in_proj_bias

    def bounds(self) -> Mapping[str, float]:
        c = self.constants
        weight, bias = c.input_norm * c.grad_norm, c.grad_norm
        return {
            "in_proj_weight": weight,
            "in_proj_bias": bias,
            "out_proj.weight": weight,
            "out_proj.bias": bias,
        }

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention` with `batch_first=True`: inputs are (B, T, d)."""
        layer = self.layer
        inputs = [self.require_examples(t, least=3) for t in (query, key, value)]
        q, k, v = map(self._heads, self._projected(inputs))
        if is_causal and attn_mask is None:  # a hint about the mask, for torch too
            raise ConfigurationError(
                f"Layer {self.name!r} got is_causal without attn_mask: give the mask as well."
            )
        mask = _joined(attn_mask, key_padding_mask, q, query.shape[0], layer.num_heads)
        dropout = layer.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed = F.dropout(weights, dropout) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        mixed = mixed.transpose(1, 2).flatten(2)
        return self._put_out(mixed), weights

    def _heads(self, x_BTd: Tensor) -> Tensor:
        B, T, d = x_BTd.shape
        H = self.layer.num_heads
        return x_BTd.view(B, T, H, d // H).transpose(1, 2)

    def _projected(self, inputs: list[Tensor]) -> Iterable[Tensor]:
        weight, bias = self.layer.in_proj_weight, self.layer.in_proj_bias
        if is_plain():
            biases = [None] * THIRDS if bias is None else bias.chunk(THIRDS)
            each = zip(inputs, weight.chunk(THIRDS), biases, strict=True)
            return [F.linear(clipped_input(x, self.constants.input_norm), w, b) for x, w, b in each]
        if len({len(x) for x in inputs}) > 1:
            raise ConfigurationError(
                f"Layer {self.name!r} got queries, keys and values of different numbers of examples: give each example "
                "its own, along the first axis."  # the numbers are secret
            )
        found: tuple[Tensor, ...] = ClippedProjections.apply(*inputs, weight, bias, self._in)  # type: ignore[no-untyped-call]
        return found

    def _put_out(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.out_proj.weight, self.layer.out_proj.bias
        if is_plain():
            return F.linear(clipped_input(x, self.constants.input_norm), weight, bias)
        z: Tensor = ClippedMap.apply(x, weight, bias, self._out)  # type: ignore[no-untyped-call]
        return z


def _joined(
    mask: Tensor | None, padding: Tensor | None, like: Tensor, batch: int, heads: int
) -> Tensor | None:
    """Both masks as numbers to add, [B or 1, heads or 1, T or 1, S]."""
    found = None
    if mask is not None:
        found = _added(mask, like)
        found = found.view(batch, heads, *found.shape[1:]) if found.dim() == 3 else found[None, None]
    if padding is not None:
        of_padding = _added(padding, like)[:, None, None]
        found = of_padding if found is None else found + of_padding
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """True means that a position is not to be looked at."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, -math.inf)
