"""Replace batch normalization by layers that do not mix examples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from clipwise.errors import ConfigurationError
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm, exchange_modules
from clipwise.layers.public_batchnorm import PUBLIC_KINDS, PublicBatchNorm
from clipwise.layers.public_statistics import PublicStatistics
from clipwise.validation.arguments import naming, one_of, require_module, whole

KINDS = (*PUBLIC_KINDS, "group", "layer", "frozen")
_REPLACED = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    BatchStatisticsNorm,
    ReleasedStatisticsNorm,
)
_MOST_GROUPS = 32
# The smallest group: normalizing two values would leave only a sign. BatchNorm1d may have one position per channel.
_FEWEST_CHANNELS, _FEWEST_VALUES = 2, 8


def replace_batchnorm(
    model: nn.Module,
    public: Tensor | Sequence[Tensor] | None = None,
    kind: str = "public",
    *,
    groups: int | None = None,
) -> tuple[nn.Module, PublicStatistics]:
    """Replace every BatchNorm of a model, in place, by a layer that does not mix examples.

    Scale and shift stay the same objects under the same names, so an optimizer that holds them stays valid.

    Args:
        model: any module with BatchNorm1d, 2d, 3d or SyncBatchNorm layers, or those of `without_running_statistics`.
        public: public rows in the form that the model takes (a tuple of tensors for several arguments). They may come
            from another data set, and must not come from the private records.
        kind: "public", "self+public", "public-exact": see `PublicBatchNorm`; "frozen": constant statistics of the
            public rows at the current weights or, without `public`, the layers' current statistics, which must come
            from public data; "group": GroupNorm; "layer": GroupNorm with one group, that is, normalization over all
            channels and positions of an example with scale and shift per channel.
        groups: for "group". By default the largest number up to 32 that divides the channels and leaves each group at
            least two channels (eight for BatchNorm1d); otherwise one group.

    Returns:
        The model (a new one only if the model itself is a BatchNorm), and its public statistics, fresh. For kinds
        without public statistics their methods do nothing, so a training loop need not distinguish the kinds.
    """
    require_module(model)
    one_of("kind", kind, KINDS)
    if public is None and kind in PUBLIC_KINDS:
        raise ConfigurationError(f"kind={kind!r} needs public rows: give public=, or use kind='group'.")
    if groups is not None:
        groups = whole("groups", groups, least=1)
        if kind != "group":
            raise ConfigurationError(f"groups is for kind='group', not for kind={kind!r}.")
    found = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    if not found:
        raise ConfigurationError("model has no BatchNorm layer to replace.")
    for name, old in found.items():
        if type(old) not in _REPLACED:
            raise ConfigurationError(
                f"Layer {name!r} is a {type(old).__name__}, which may do more than batch normalization, or is not "
                "initialized yet: replace it by hand, for instance with PublicBatchNorm, or run the model once."
            )
    new = [_new_layer(name, old, kind, groups, public is not None) for name, old in found.items()]
    model = exchange_modules(model, dict(zip(found.values(), new, strict=True)))
    try:
        statistics = PublicStatistics(model, None if kind in ("group", "layer") else public)
        with naming("public"):
            statistics.refresh()
    except BaseException:
        exchange_modules(model, dict(zip(new, found.values(), strict=True)))  # restore the model
        raise
    if kind == "frozen":
        statistics.freeze()
    return model, statistics


def _new_layer(name: str, old: _BatchNorm, kind: str, groups: int | None, has_public: bool) -> nn.Module:
    """The replacement of a layer, with its scale and shift (the same objects) and its mode."""
    new: nn.GroupNorm | PublicBatchNorm
    if kind in ("group", "layer"):
        new = _group_norm(name, old, 1 if kind == "layer" else groups)
    else:
        new = PublicBatchNorm(old.num_features, old.eps, old.affine, kind="public" if kind == "frozen" else kind)
        if not has_public:
            if old.running_mean is None or (isinstance(old, BatchStatisticsNorm) and not old.has_statistics):
                raise ConfigurationError(
                    f"Layer {name!r} has no running statistics to freeze: give public rows to compute them."
                )
            new.running_mean, new.running_var = old.running_mean.clone(), old.running_var.clone()  # type: ignore[union-attr]
            new.freeze()
        elif (at := next(iter([*old.parameters(), *old.buffers()]), None)) is not None:
            new.running_mean, new.running_var = new.running_mean.to(at), new.running_var.to(at)
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


def _group_norm(name: str, old: _BatchNorm, groups: int | None) -> nn.GroupNorm:
    channels, has_positions = old.num_features, not isinstance(old, nn.BatchNorm1d)
    fewest = _FEWEST_CHANNELS if has_positions else _FEWEST_VALUES
    fitting = (g for g in range(_MOST_GROUPS, 0, -1) if channels % g == 0 and channels // g >= fewest)
    chosen = next(fitting, 1) if groups is None else groups
    if chosen < 1 or channels % chosen:
        raise ConfigurationError(f"Layer {name!r}: groups={chosen} does not divide its {channels} channels.")
    if channels == chosen and not has_positions:
        raise ConfigurationError(
            f"Layer {name!r}: a group would have one value, which normalization always maps to 0, unless there are "
            "several positions: use fewer groups, no normalization there, or kind='public'."
        )
    return nn.GroupNorm(chosen, channels, old.eps, old.affine)
