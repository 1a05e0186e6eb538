"""A linear output layer with cross entropy, from tiles of the vocabulary.

Legend: N positions, d features, V words (v in a tile).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from clipwise.errors import ConfigurationError
from clipwise.gradients.forms.head import TILE_BYTES, Words


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")` without storing the logits.

    For language models with a large vocabulary: the logits of a batch, [..., V], are several times the size of
    everything else. Here the logits of one tile of words exist at a time: in the forward pass, in the backward pass,
    and in the norms and sums of private training. The weight may also be the table of an embedding.

        losses = linear_cross_entropy(hidden, model.embedding.weight, ids)  # one loss for each token
        private.step(losses.mean(1))

    Args:
        x: the inputs of the layer, [..., d].
        weight: the weight of the layer, [V, d].
        targets: the class of each position, [...].
        bias: the bias of the layer, [V].
        ignore_index: positions with this target have a loss of 0.

    Returns:
        The losses, [...], in float32 or better.

    Guarantee:
        Each loss depends on its own position alone, and per-example gradients are exact, as for the two operations that
        it replaces.
    """
    if targets.shape != x.shape[:-1]:
        raise ConfigurationError(
            "linear_cross_entropy: targets must have one class for each position, so the shape of x without its last "
            "axis."
        )
    products = torch.promote_types(x.dtype, weight.dtype)
    if torch.is_autocast_enabled(x.device.type):
        products = torch.get_autocast_dtype(x.device.type)
    is_counted = targets != ignore_index
    x_Nd, target_N = x.flatten(0, -2), torch.where(is_counted, targets, 0).flatten()
    losses_N, lse_N = _losses(x_Nd, target_N, Words(weight.detach(), _detached(bias), products))
    if torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        losses_N = losses_N + _weight_gradient(weight, bias, products, x_Nd.detach(), lse_N, target_N)
    return torch.where(is_counted, losses_N.view(targets.shape), 0)


class _Losses(Function):
    """The losses, with gradients at x alone; and the logarithm of the sum of the exponentials of all logits."""

    @staticmethod
    def forward(ctx: Any, x_Nd: Tensor, target_N: Tensor, words: Words) -> tuple[Tensor, Tensor]:
        found: list[tuple[Tensor, Tensor]] = []
        for tile in words.tiles(_width(len(x_Nd))):
            logits_Nv = words.logits(x_Nd, tile)
            place_N = target_N - tile.start
            inside_N = (place_N >= 0) & (place_N < logits_Nv.shape[1])
            picked_N = logits_Nv.gather(1, place_N.clamp(0, logits_Nv.shape[1] - 1)[:, None])[:, 0]
            found.append((logits_Nv.logsumexp(1), torch.where(inside_N, picked_N, 0)))
        sums, picked = (torch.stack(parts) for parts in zip(*found, strict=True))
        lse_N = sums.logsumexp(0)
        ctx.words = words
        ctx.save_for_backward(x_Nd, lse_N, target_N)
        ctx.mark_non_differentiable(lse_N)
        return lse_N - picked.sum(0), lse_N

    @staticmethod
    def backward(ctx: Any, g_N: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        x_Nd, lse_N, target_N = ctx.saved_tensors
        words, total = ctx.words, torch.zeros_like(x_Nd, dtype=lse_N.dtype)
        for tile in words.tiles(_width(len(x_Nd))):
            delta_Nv = words.delta(x_Nd, lse_N, target_N, g_N, tile).to(words.products)
            total += delta_Nv @ words.weight[tile].to(words.products)
        return total.to(x_Nd.dtype), None, None


class _WeightGradient(Function):
    """Zeros with the gradients of the losses at the weight and the bias. A pass that needs neither skips this."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        products: torch.dtype,
        x_Nd: Tensor,
        lse_N: Tensor,
        target_N: Tensor,
    ) -> Tensor:
        saved = (weight,) if bias is None else (weight, bias)
        ctx.save_for_backward(*saved, x_Nd, lse_N, target_N)
        ctx.words = lambda: Words(weight.detach(), _detached(bias), products)
        return torch.zeros_like(lse_N)

    @staticmethod
    def backward(ctx: Any, g_N: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        *_, x_Nd, lse_N, target_N = ctx.saved_tensors
        words: Words = ctx.words()
        of_weight, of_bias = torch.empty_like(words.weight), None
        if words.bias is not None:
            of_bias = torch.empty_like(words.bias)
        for tile in words.tiles(_width(len(x_Nd))):
            delta_Nv = words.delta(x_Nd, lse_N, target_N, g_N, tile)
            of_weight[tile] = delta_Nv.to(words.products).T @ x_Nd.to(words.products)
            if of_bias is not None:
                of_bias[tile] = delta_Nv.sum(0)
        return of_weight, of_bias, None, None, None, None


_losses: Any = _Losses.apply
_weight_gradient: Any = _WeightGradient.apply


def _width(positions: int) -> int:
    """How many words to take at a time."""
    return max(256, TILE_BYTES // (4 * max(1, positions)))


def _detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()
