"""Statistics of public rows at every `PublicBatchNorm` of a model, kept up to date with the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipwise.errors import ConfigurationError, StepError
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.sampling.batch_structure import evaluating
from clipwise.validation.inventory import Changes, Inventory

Moments = tuple[Tensor, Tensor]  # mean and variance per channel


class PublicStatistics:
    """Runs public rows through a model and gives each `PublicBatchNorm` their mean and variance.

    Call `refresh` after every update of the weights, before the next batch is drawn or the model is evaluated, and with
    kind "public-exact" pass each released gradient through `correct` before the update (a private run does both). The
    public rows run in `.eval()` mode, so that dropout does not make the statistics random.

    Args:
        model: a model with `PublicBatchNorm` layers.
        public: public rows in the form that the model takes: a tensor, or a tuple of tensors for several arguments.
            None for a model without such a layer; then nothing is computed.

    Guarantee:
        Costs no privacy: statistics and corrections are functions of public rows and of released values.
    """

    def __init__(self, model: nn.Module, public: Tensor | Sequence[Tensor] | None) -> None:
        self._model = model
        self.public_rows = () if public is None else as_rows(public)  # the arguments of the public forward pass
        self.rows = len(self.public_rows[0]) if self.public_rows else 0
        self._layers: dict[str, PublicBatchNorm] = {
            name: m for name, m in model.named_modules() if isinstance(m, PublicBatchNorm) and not m.is_frozen
        }
        for name, layer in self._layers.items():
            if public is None:
                raise ConfigurationError(f"Layer {name!r} ({type(layer).__name__}) needs public rows: give public.")
            if layer.statistics is not None:
                raise ConfigurationError(f"Layer {name!r} has public statistics already: a model needs one.")
        self.corrects = any(layer.kind == "public-exact" for layer in self._layers.values())
        self.require_correctable(model)
        for layer in self._layers.values():
            layer.statistics = self
        self._inventory = Inventory(model)
        self.collected: dict[PublicBatchNorm, Moments] | None = None  # while the public rows run through the model
        self._graph: dict[PublicBatchNorm, Moments] = {}  # the latest moments, with their autograd graph
        self._changes: Changes | None = None  # of all parameters and buffers since the last refresh
        self._is_held = False

    def refresh(self, force: bool = False) -> bool:
        """Recompute the statistics if weights changed. Returns whether they were recomputed.

        This takes one forward pass of the public rows. Use `force` for changes that torch does not count: on an
        accelerator, a write through `.data`, a fused optimizer or a replayed CUDA graph.
        """
        self._inventory.up_to_date()
        if not self._layers or (self.is_fresh and not force):
            return False
        moments = self._public_pass()
        with torch.no_grad():
            for layer, (mean_C, var_C) in moments.items():
                layer.running_mean.copy_(mean_C)
                layer.running_var.copy_(var_C)
                layer.rows = self.rows
        self._graph = moments if self.corrects else {}
        self._changes = Changes(self._tensors())
        self._changes.remember()
        return True

    def correct(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter] | None = None
    ) -> dict[str, Tensor]:
        """Add the gradient through the public statistics to a released gradient.

        With y = gamma (x - mu) r + beta and r = (v + eps)^(-1/2), the gradients of the statistics follow from those of
        scale and shift alone:

            dl/dmu = -gamma r dl/dbeta,    dl/dv = -1/2 gamma r^2 dl/dgamma

        They are backpropagated through the public forward pass that computed mu and v. Both maps are linear, so the
        corrected sum is the sum of the corrected gradients; without clipping and noise the result is the exact
        gradient. Call this before the weights are updated. Entries that are not parameters are not changed.

        Args:
            gradients: the released gradients by name.
            parameters: the parameters by name, if the model is part of a larger one; by default the model's own.
        """
        corrected = dict(gradients)
        if not self.corrects:
            return corrected
        self.require_fresh()
        named = dict(self._model.named_parameters()) if parameters is None else parameters
        names = {p: name for name, p in named.items()}
        moments, self._graph = self._graph or self._public_pass(), {}
        roots: list[Tensor] = []  # the moments
        cotangents: list[Tensor] = []
        for place, layer in self._exact().items():
            assert layer.weight is not None and layer.bias is not None
            given = [(p, gradients.get(names.get(p, ""))) for p in (layer.weight, layer.bias)]
            if any(g is None or g.shape != p.shape for p, g in given):
                raise ConfigurationError(
                    f"Layer {place!r}: kind='public-exact' needs the gradients of its scale and shift: give all "
                    "gradients that were released, by the names of the model's parameters."
                )
            mean_C, var_C = moments[layer]
            if not mean_C.requires_grad:
                continue  # nothing trainable before it
            scale_C, r_C = layer.weight.detach(), (var_C.detach() + layer.eps).rsqrt()
            of_scale_C, of_shift_C = (gradients[names[p]].to(mean_C) for p in (layer.weight, layer.bias))
            roots += [mean_C, var_C]
            cotangents += [-scale_C * r_C * of_shift_C, -0.5 * scale_C * r_C.square() * of_scale_C]
        if not roots:
            return corrected
        trained = [p for p in self._model.parameters() if p.requires_grad and names.get(p) in gradients]
        found = torch.autograd.grad(roots, trained, cotangents, allow_unused=True)
        for name, through_statistics in zip(map(names.__getitem__, trained), found, strict=True):
            if through_statistics is not None:
                corrected[name] = gradients[name] + through_statistics.to(gradients[name])
        return corrected

    def freeze(self) -> nn.Module:
        """Make the statistics constants, for use of the model without the public rows. Returns the model.

        It computes the same function, but the statistics no longer follow changes of the weights.
        """
        self.require_fresh()
        for layer in self._layers.values():
            layer.freeze()
        self._layers, self._graph, self.corrects = {}, {}, False
        return self._model

    @property
    def is_fresh(self) -> bool:
        """Whether the statistics belong to the current weights; on an accelerator, as far as torch counts changes."""
        return self._is_fresh()

    def require_fresh(self, layer: PublicBatchNorm | None = None) -> None:
        """Raise an error if the statistics are stale.

        In a forward pass, only the first layer compares the contents of all weights.
        """
        looks_inside = layer is None or layer is next(iter(self._layers.values()), None)
        if self._layers and not self._is_held and not self._is_fresh(looks_inside):
            raise StepError(
                "The public statistics are stale: weights or buffers changed since they were made (an update, "
                "load_state_dict, .to(), a copy, torch.export). Call PublicStatistics.of(model).refresh() after every "
                "such change. To export a model, refresh a deep copy of it and call PublicStatistics.freeze()."
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Treat the statistics as fresh inside this block, for code that uses equal copies of the model's buffers."""
        self.require_fresh()
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def collect(self, layer: PublicBatchNorm, mean_C: Tensor, var_C: Tensor, rows: int) -> None:
        """Called by a layer with its moments of the public rows and its number of input rows."""
        assert self.collected is not None
        where = next(f"Layer {name!r}" for name, other in self._layers.items() if other is layer)
        if layer in self.collected:
            raise ConfigurationError(
                f"{where} is called more than once in a forward pass, but has one mean and variance: use a layer of "
                "its own at each place, which may share scale and shift."
            )
        if layer.kind == "self+public" and rows != self.rows:
            raise ConfigurationError(
                f"{where} gets {rows} rows for {self.rows} public ones: its input must have one row per example. Give "
                "it inputs of shape [B, C, ...], or use kind='public'."
            )
        self.collected[layer] = mean_C, var_C

    @staticmethod
    def all_of(model: nn.Module) -> list[PublicStatistics]:
        """All public statistics of a model's layers: one, unless they were created for parts of the model."""
        layers = (m for m in model.modules() if isinstance(m, PublicBatchNorm))
        return list(dict.fromkeys(layer.statistics for layer in layers if layer.statistics is not None))

    @staticmethod
    def of(model: nn.Module) -> PublicStatistics:
        """The public statistics of a model; raises an error if there is none or more than one."""
        found = PublicStatistics.all_of(model)
        if len(found) == 1:
            return found[0]
        raise ConfigurationError(
            f"The model has {len(found)} public statistics, not one: make PublicStatistics(model, public), or find "
            "those of its parts with PublicStatistics.all_of(model)."
        )

    def require_correctable(self, model: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        """Refuse "public-exact" layers for which `correct` cannot work.

        `correct` needs the gradients of scale and shift: both must belong to this layer only and must be trained.
        `model` may be a larger model of which this one is a part.
        """
        uses = [p for module in model.modules() for p in module._parameters.values()]
        trained = None if parameters is None else set(parameters.values())
        for name, layer in self._exact().items():
            for key in ("weight", "bias"):
                p = layer._parameters.get(key)
                is_own = p is not None and p.requires_grad and sum(p is other for other in uses) == 1
                if not is_own or (trained is not None and p not in trained):
                    raise ConfigurationError(
                        f"Layer {name!r}: kind='public-exact' uses the gradient of its {key}, so it needs a {key} of "
                        "its own that is trained in this run. Let it require gradients, give the layer a copy if "
                        "several layers share it, and train the whole model; or use kind='public'."
                    )

    def _public_pass(self) -> dict[PublicBatchNorm, Moments]:
        """The moments of the public rows at each layer, with their graph if `correct` needs it."""
        collected: dict[PublicBatchNorm, Moments] = {}
        self.collected = collected
        try:
            with (
                evaluating(self._model),
                torch.inference_mode(False),
                _differentiable(self._model) if self.corrects else torch.no_grad(),
            ):
                at = next(iter(self._layers.values())).running_mean
                rows = (x.to(at) if x.is_floating_point() else x.to(at.device) for x in self.public_rows)
                self.public_rows = tuple(rows)
                self._model(*self.public_rows)
        finally:
            self.collected = None
        for name, layer in self._layers.items():
            if layer not in collected:
                raise ConfigurationError(
                    f"Layer {name!r} ({type(layer).__name__}) was not reached by the public rows: it must be used in "
                    "model(public), or must not be replaced."
                )
        return collected

    def _exact(self) -> dict[str, PublicBatchNorm]:
        return {name: layer for name, layer in self._layers.items() if layer.kind == "public-exact"}

    def _is_fresh(self, looks_inside: bool = True) -> bool:
        changes = self._changes
        if changes is None or not changes.are_of(list(self._tensors())):
            return False
        return not (changes.may_have_changed() if looks_inside else changes.was_counted())

    def _tensors(self) -> Iterator[Tensor]:
        held = (tensors[key] for _, tensors, key in self._inventory.tensors)
        return (t for t in held if t is not None and not is_lazy(t))

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy. The copy is stale, and a graph cannot be copied."""
        return {**self.__dict__, "_graph": {}, "_changes": None, "_inventory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._inventory = Inventory(self._model)


class AllPublicStatistics:
    """Every `PublicStatistics` of a model, with their methods. Each may belong to a part, such as one of two encoders.

    Each part has its own public rows, so no statistics depend on another part's weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._each = model, PublicStatistics.all_of(model)

    def __bool__(self) -> bool:
        return bool(self._each)

    def refresh(self, force: bool = False) -> None:
        for statistics in self._each:
            statistics.refresh(force)

    @contextmanager
    def held(self) -> Iterator[None]:
        with ExitStack() as stack:
            for statistics in self._each:
                stack.enter_context(statistics.held())
            yield

    def require_complete(self) -> None:
        """Refuse layers that have no public rows and are not frozen: their forward pass would fail."""
        for name, layer in self._model.named_modules():
            if isinstance(layer, PublicBatchNorm) and layer.statistics is None and not layer.is_frozen:
                raise ConfigurationError(
                    f"Layer {name!r} ({type(layer).__name__}) has no public statistics: make "
                    "PublicStatistics(model, public) before make_private, or use replace_batchnorm."
                )

    def require_correctable(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for statistics in self._each:
            statistics.require_correctable(self._model, parameters)

    def correct(self, gradients: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> Mapping[str, Tensor]:
        """As for one. Parts share no scale or shift, so their order does not matter."""
        for statistics in self._each:
            gradients = statistics.correct(gradients, parameters)
        return gradients

    def public_rows(self) -> list[Tensor]:
        return [rows for statistics in self._each for rows in statistics.public_rows]

    def describe(self) -> dict[str, Any]:
        """The configuration in plain types, for fingerprints and statements."""
        named = self._model.named_modules()
        followed = {name: m for name, m in named if isinstance(m, PublicBatchNorm) and not m.is_frozen}
        return {
            "rows": sum(statistics.rows for statistics in self._each),
            "kinds": {name: layer.kind for name, layer in followed.items()},
        }


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Record a graph in `.eval()`, where cuDNN has no backward pass of recurrent layers and torch's kernels do."""
    was_enabled = torch.backends.cudnn.enabled
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    torch.backends.cudnn.enabled = was_enabled and not is_recurrent
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.backends.cudnn.enabled = was_enabled


def as_rows(public: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Validate public rows; returns them as a tuple of detached tensors, one per argument of the model."""
    rows = (public,) if isinstance(public, Tensor) else public
    is_rows = isinstance(rows, (tuple, list)) and all(isinstance(x, Tensor) and x.dim() for x in rows)
    if not is_rows or not rows:  # in this order: some types have no truth value
        raise ConfigurationError(
            "public must be a tensor of rows in the form that the model takes, or a tuple of tensors for several "
            f"arguments, not {type(public).__name__}."
        )
    if len({len(x) for x in rows}) > 1 or len(rows[0]) < 2:
        raise ConfigurationError("public must hold at least two rows, the same number in each tensor.")
    if not all(bool(torch.isfinite(x).all()) for x in rows):
        raise ConfigurationError("public holds values that are not finite: leave those rows out.")
    return tuple(x.detach() for x in rows)
