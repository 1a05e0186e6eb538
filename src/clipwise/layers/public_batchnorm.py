"""Batch normalization with statistics of public rows, so that examples are not mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, StepError
from clipwise.validation.arguments import number, one_of, whole

if TYPE_CHECKING:
    from clipwise.layers.public_statistics import PublicStatistics

PUBLIC_KINDS = ("public", "self+public", "public-exact")
_ROWS = "public_rows"  # the state_dict key of M


class PublicBatchNorm(nn.Module):
    """y = gamma (x - mu) / sqrt(v + eps) + beta, with mu and v per channel from public rows.

    Training and evaluation compute the same function. A `PublicStatistics` computes the statistics and must be
    refreshed after every change of the weights: stale statistics raise an error. The statistics are buffers with the
    names of BatchNorm's, and are functions of public rows and weights alone.

    Args:
        num_features: C, the number of channels.
        eps, affine: as in BatchNorm.
        kind: "public": mu and v are those of the public rows; "public-exact": the same, and `PublicStatistics.correct`
            adds the gradient through them to the released gradient; "self+public": those of the example together with
            the public rows.

    Guarantee:
        - Sensitivity: per-example clipping keeps C under zero-out and 2 C under replace-one, because an example's
          output depends on no other example of the batch.
        - The buffers are post-processing: functions of released weights and public rows.
        - Assumption: the public rows are not drawn from the private records.
    """

    buffers_follow_weights = True  # so that ModelState does not record them
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        kind: str = "public",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        one_of("kind", kind, PUBLIC_KINDS)
        if kind == "public-exact" and not affine:
            raise ConfigurationError(
                "kind='public-exact' needs a scale and a shift, because it uses their gradients: use affine=True, or "
                "kind='public'."
            )
        self.num_features = whole("num_features", num_features, least=1)
        self.eps, self.affine, self.kind = number("eps", eps, least=0), affine, kind
        self.statistics: PublicStatistics | None = None
        self.rows = 0  # M, the number of public rows
        self.is_frozen = False
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.ones(num_features, **made)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features, **made)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features, **made))
        self.register_buffer("running_var", torch.ones(num_features, **made))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each example independently; or, in the pass that collects statistics, all public rows together."""
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ConfigurationError(
                f"{type(self).__name__}({self.num_features}) takes inputs of shape [B, {self.num_features}, ...], with "
                "the channels second."
            )
        if self.statistics is not None:
            if self.statistics.collected is not None:
                var_C, mean_C = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
                self.statistics.collect(self, mean_C, var_C, len(x))
                return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
            self.statistics.require_fresh(self)
        elif not self.is_frozen:
            raise StepError(
                f"A {type(self).__name__} has no public statistics: make PublicStatistics(model, public), or use "
                "replace_batchnorm."
            )
        if self.kind == "self+public":
            if not self.rows:
                raise StepError(
                    f"A {type(self).__name__} of kind='self+public' has statistics without a number of public rows: "
                    "load a state_dict of such a layer, or make PublicStatistics(model, public)."
                )
            return self._with_public_rows(x)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    def _with_public_rows(self, x: Tensor) -> Tensor:
        """Use the statistics of M public rows and the example, whose own statistics are m and s:

        mu = mu_p + (m - mu_p) / (M + 1)
        v  = (M v_p + s) / (M + 1) + M (m - mu_p)^2 / (M + 1)^2
        """
        M = self.rows
        x_BCT = x.flatten(2) if x.dim() > 2 else x[..., None]
        m_BC1 = x_BCT.mean(2, keepdim=True)
        centred_BCT = x_BCT - m_BC1
        s_BC1 = centred_BCT.square().mean(2, keepdim=True)
        away_BC1 = (m_BC1 - self.running_mean[:, None]) / (M + 1)
        v_BC1 = (M * self.running_var[:, None] + s_BC1) / (M + 1) + M * away_BC1.square()
        normal_BCT = (centred_BCT + M * away_BC1) * (v_BC1 + self.eps).rsqrt()
        if self.weight is not None and self.bias is not None:
            normal_BCT = normal_BCT * self.weight[:, None] + self.bias[:, None]
        return normal_BCT.reshape(x.shape)

    def freeze(self) -> None:
        """Make the statistics constants that no longer follow the weights."""
        self.statistics, self.is_frozen = None, True

    def extra_repr(self) -> str:
        frozen = ", frozen" if self.is_frozen else ""
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, kind={self.kind!r}{frozen}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Use the keys of BatchNorm, so that it can load them. "self+public" also stores M."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.kind == "self+public":
            destination[f"{prefix}{_ROWS}"] = torch.tensor(self.rows)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Also load a state_dict of BatchNorm, ignoring `num_batches_tracked`."""
        _, strict, missing_keys, *_ = rest
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        if self.kind == "self+public":
            rows = state_dict.pop(f"{prefix}{_ROWS}", None)
            if rows is not None:
                self.rows = int(rows)
            elif strict and self.statistics is None:
                missing_keys.append(f"{prefix}{_ROWS}")
        super()._load_from_state_dict(state_dict, prefix, *rest)
