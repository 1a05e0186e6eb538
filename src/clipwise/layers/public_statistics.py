"""The statistics of public rows in every `PublicBatchNorm` of a model, as fresh as its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipwise.errors import ConfigurationError, StepError
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.layers.weight_parametrizations import NoisyWeights
from clipwise.sampling.batch_structure import evaluating
from clipwise.validation.inventory import Inventory
from clipwise.validation.tensor_changes import Changes

Moments = tuple[Tensor, Tensor]  # mean and variance of a layer's channels


class PublicStatistics:
    """Runs public rows through a model, and gives each `PublicBatchNorm` their mean and variance there.

    After every update of the weights, and before the next batch is drawn or the model is evaluated, call
    `refresh`. With kind "public-exact" each released gradient goes through `correct` before the update.

    The public rows run in `.eval()` mode, so that dropout does not make the statistics random.

    Args:
        model: one that has `PublicBatchNorm` layers.
        public: public rows as the model takes them, a tensor, or a tuple of tensors for several arguments.
            None for a model that has no such layer, with which there is nothing to do.

    Guarantee:
        Costs no privacy: statistics and corrections are functions of public rows and of what was released.
    """

    def __init__(self, model: nn.Module, public: Tensor | Sequence[Tensor] | None) -> None:
        self._model = model
        self._public = () if public is None else as_rows(public)
        self.rows = len(self._public[0]) if self._public else 0
        self._layers: dict[str, PublicBatchNorm] = {
            name: m for name, m in model.named_modules() if isinstance(m, PublicBatchNorm) and not m.is_frozen
        }
        for name, layer in self._layers.items():
            if public is None:
                raise ConfigurationError(
                    f"Layer {name!r} ({type(layer).__name__}) needs public rows: give public."
                )
            if layer.statistics is not None:
                raise ConfigurationError(
                    f"Layer {name!r} has public statistics already: one PublicStatistics serves a model."
                )
        self.corrects = any(layer.kind == "public-exact" for layer in self._layers.values())
        self.require_correctable(model)
        if self._layers:
            _require_settled_weights(model)
        for layer in self._layers.values():
            layer.statistics = self
        self._inventory = Inventory(model)
        self._collected: dict[PublicBatchNorm, Moments] | None = None
        self._graph: dict[PublicBatchNorm, Moments] = {}  # the last ones, with the graph that made them
        self._changes: Changes | None = None  # of all parameters and buffers, since the statistics were made
        self._is_held = False

    # -------------------------------------------------------------- for the loop

    def refresh(self, force: bool = False) -> bool:
        """Make the statistics those of the present weights. Does nothing if they are; returns whether they were not.

        One forward pass of the public rows. `force` where weights changed and nobody can tell: on an accelerator
        after a write through `.data`, a fused optimizer or a replayed CUDA graph.
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
        """Add the gradient through the public statistics to a released one, by parameter.

        With y = gamma (x - mu) r + beta and r = (v + eps)^(-1/2), what the loss owes to the statistics shows in
        the gradients of scale and shift alone, whatever the examples are:

            dl/dmu = -gamma r dl/dbeta,    dl/dv = -1/2 gamma r^2 dl/dgamma

        These go back through the pass of the public rows that made mu and v. Both steps are linear, so the sum of
        examples gives the sum of their corrections; without clipping and noise the result is the gradient through
        everything. It must be called before the weights are updated. Other entries than parameters stay as they are.

        Args:
            gradients: what was released, by name.
            parameters: what the names stand for, where the model is a part of a larger one; by default its own.
        """
        corrected = dict(gradients)
        exact = self._exact()
        if not exact:
            return corrected
        self.require_fresh()
        named = dict(self._model.named_parameters()) if parameters is None else parameters
        names = {p: name for name, p in named.items()}  # a parameter is known by its identity
        moments, self._graph = self._graph or self._public_pass(), {}
        roots: list[Tensor] = []
        cotangents: list[Tensor] = []
        for place, layer in exact.items():
            assert layer.weight is not None and layer.bias is not None
            for p in (layer.weight, layer.bias):
                if names.get(p) not in gradients or gradients[names[p]].shape != p.shape:
                    raise ConfigurationError(
                        f"Layer {place!r}: kind='public-exact' needs the gradients of its scale and shift: give "
                        "all gradients that were released, by the names of the model's parameters."
                    )
            mean_C, var_C = moments[layer]
            if not mean_C.requires_grad:
                continue  # nothing trainable before it
            scale_C = layer.weight.detach()
            r_C = (var_C.detach() + layer.eps).rsqrt()
            shift_gradient_C = gradients[names[layer.bias]].to(mean_C)
            scale_gradient_C = gradients[names[layer.weight]].to(mean_C)
            roots += [mean_C, var_C]
            cotangents += [
                -scale_C * r_C * shift_gradient_C,
                -0.5 * scale_C * r_C.square() * scale_gradient_C,
            ]
        if not roots:
            return corrected
        trained = [p for p in self._model.parameters() if p.requires_grad and names.get(p) in gradients]
        found = torch.autograd.grad(roots, trained, cotangents, allow_unused=True)
        for p, through_statistics in zip(trained, found, strict=True):
            if through_statistics is not None:
                name = names[p]
                corrected[name] = gradients[name] + through_statistics.to(gradients[name])
        return corrected

    def freeze(self) -> nn.Module:
        """Make the statistics constants, for a model that goes where the public rows are not. Returns the model.

        It computes the same function from then on, but no longer follows changes of the weights.
        """
        self.require_fresh()
        for layer in self._layers.values():
            layer.freeze()
        self._layers, self._graph, self.corrects = {}, {}, False
        return self._model

    @property
    def public_rows(self) -> tuple[Tensor, ...]:
        """What the model is called with."""
        return self._public

    # ------------------------------------------------------------ for the layers

    @property
    def is_fresh(self) -> bool:
        """Whether the statistics are those of the present weights; on an accelerator, as far as torch counts."""
        return self._is_fresh(looks_inside=True)

    @property
    def is_collecting(self) -> bool:
        """Whether it is public rows that run through the model at present."""
        return self._collected is not None

    def require_fresh(self, layer: PublicBatchNorm | None = None) -> None:
        """Refuse to work with statistics of other weights.

        A layer that asks names itself: to look at the contents of all weights once in a forward pass is enough, and
        it is the first layer that does.
        """
        looks_inside = layer is None or layer is next(iter(self._layers.values()), None)
        if self._layers and not self._is_held and not self._is_fresh(looks_inside):
            raise StepError(
                "The public statistics are stale: weights or buffers changed since they were made (an update, "
                "load_state_dict, .to(), a copy of the model, torch.export). Call PublicStatistics.refresh() after "
                "every such change, before the next batch is drawn or the model is evaluated; "
                "PublicStatistics.of(model) finds it. To export or trace a model, take a copy (copy.deepcopy), refresh "
                "its statistics and turn them into constants with PublicStatistics.freeze()."
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """In this block the statistics count as fresh, for who works with equal copies of the model's buffers."""
        self.require_fresh()
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def collect(self, layer: PublicBatchNorm, mean_C: Tensor, var_C: Tensor, rows: int) -> None:
        """Called by a layer for the public rows that reach it, and for how many it takes them."""
        assert self._collected is not None
        if layer in self._collected:
            raise ConfigurationError(
                f"Layer {self._name(layer)!r} ({type(layer).__name__}) is called more than once in a forward pass, but "
                "has one mean and variance: use a layer of its own at each place, which may share scale and shift."
            )
        if layer.kind == "self+public" and rows != self.rows:
            raise ConfigurationError(
                f"Layer {self._name(layer)!r} ({type(layer).__name__}) gets {rows} rows for {self.rows} public ones: "
                "the statistics of one example are not those of one row. Let it have inputs of shape [B, C, ...], or "
                "use kind='public'."
            )
        self._collected[layer] = mean_C, var_C

    @staticmethod
    def all_of(model: nn.Module) -> list[PublicStatistics]:
        """The public statistics that a model's layers have: one, unless parts of it were given theirs one by one."""
        layers = (m for m in model.modules() if isinstance(m, PublicBatchNorm))
        return list(dict.fromkeys(layer.statistics for layer in layers if layer.statistics is not None))

    @staticmethod
    def of(model: nn.Module) -> PublicStatistics:
        """The public statistics of a model, or an error. A copy of a model has its own."""
        found = PublicStatistics.all_of(model)
        if not found:
            raise ConfigurationError("The model has no layer with public statistics.")
        if len(found) > 1:
            raise ConfigurationError(
                f"The model has {len(found)} public statistics, since parts of it were given theirs one by one: "
                "PublicStatistics.all_of(model) finds all of them."
            )
        return found[0]

    def require_correctable(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """Refuse "public-exact" where `correct` could not work, in a model of which this one may be a part.

        It reads off what the loss owes to the statistics from scale and shift: they must be the layer's own, and
        among the parameters that are trained.
        """
        uses = [p for module in model.modules() for p in module._parameters.values()]
        trained = None if parameters is None else set(parameters.values())
        for name, layer in self._exact().items():
            for key in ("weight", "bias"):
                p = layer._parameters.get(key)
                problem = ""
                if p is None or not p.requires_grad:
                    problem = (
                        f"needs a trainable {key}, whose gradient it works with. Let it require gradients"
                    )
                elif sum(p is other for other in uses) > 1:
                    problem = f"needs a {key} of its own, but the model has it at several places. Give the layer a copy"
                elif trained is not None and p not in trained:
                    problem = (
                        f"works with the gradient of its {key}, which is no parameter of the model that is trained. "
                        "Train the whole model that the public statistics were made for"
                    )
                if problem:
                    raise ConfigurationError(
                        f"Layer {name!r}: kind='public-exact' {problem}, or use kind='public'."
                    )

    # -------------------------------------------------------------------- inside

    def _public_pass(self) -> dict[PublicBatchNorm, Moments]:
        """The public rows' moments at each layer; with their graph where gradients will be sent back through it."""
        self._collected = {}
        try:
            with (
                evaluating(self._model),
                torch.inference_mode(False),
                _differentiable(self._model) if self.corrects else torch.no_grad(),
            ):
                self._public = placed(self._public, next(iter(self._layers.values())).running_mean)
                self._model(*self._public)
            collected = self._collected
        finally:
            self._collected = None
        for name, layer in self._layers.items():
            if layer not in collected:
                raise ConfigurationError(
                    f"Layer {name!r} ({type(layer).__name__}) was not reached by the public rows: it must be used in "
                    "model(public), or be left as it is."
                )
        return collected

    def _exact(self) -> dict[str, PublicBatchNorm]:
        return {name: layer for name, layer in self._layers.items() if layer.kind == "public-exact"}

    def _is_fresh(self, looks_inside: bool) -> bool:
        changes = self._changes
        if changes is None or not changes.are_of(list(self._tensors())):
            return False
        return not (changes.may_have_changed() if looks_inside else changes.was_counted())

    def _tensors(self) -> Iterator[Tensor]:
        """Every parameter and buffer there is now."""
        held = (tensors[key] for _, tensors, key in self._inventory.tensors)
        return (t for t in held if t is not None and not is_lazy(t))

    def _name(self, layer: PublicBatchNorm) -> str:
        return next(name for name, other in self._layers.items() if other is layer)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs. It is stale at first, since its tensors are others; a graph cannot be copied."""
        return {**self.__dict__, "_graph": {}, "_changes": None, "_inventory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._inventory = Inventory(self._model)


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """With a graph, in `.eval()`: there cuDNN does not go back through recurrent layers, and torch's own kernels do."""
    was_enabled = torch.backends.cudnn.enabled
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    torch.backends.cudnn.enabled = was_enabled and not is_recurrent
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.backends.cudnn.enabled = was_enabled


def _require_settled_weights(model: nn.Module) -> None:
    """Weights that are drawn anew have no statistics: the public rows would meet other ones than the batch."""
    for name, module in model.named_modules():
        if isinstance(module, NoisyWeights):
            layer = name.partition("parametrizations")[0].rstrip(".")
            raise ConfigurationError(
                f"Layer {layer!r} draws its weights anew at each pass: the public statistics would be those of other "
                "draws than the batch meets. Use kind='group' or kind='layer'."
            )


def as_rows(public: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The arguments of a call of the model on public rows, detached from whatever made them."""
    rows = (public,) if isinstance(public, Tensor) else public
    is_rows = isinstance(rows, (tuple, list)) and all(isinstance(x, Tensor) and x.dim() for x in rows)
    if not is_rows or not rows:  # in this order: not everything can say whether it is empty
        raise ConfigurationError(
            "public must be a tensor of rows as the model takes them, or a tuple of tensors for several arguments, not "
            f"{type(public).__name__}."
        )
    if len({len(x) for x in rows}) > 1 or len(rows[0]) < 2:
        raise ConfigurationError(
            "public must hold two rows or more, as many in each tensor: statistics of one row say nothing."
        )
    if not all(bool(torch.isfinite(x).all()) for x in rows):
        raise ConfigurationError(
            "public holds values that are not finite: leave those rows out, or statistics would not be."
        )
    return tuple(x.detach() for x in rows)


def placed(rows: tuple[Tensor, ...], at: Tensor) -> tuple[Tensor, ...]:
    """On the device and, if they are no ids, in the precision of a tensor of the model."""
    return tuple(x.to(at) if x.is_floating_point() else x.to(at.device) for x in rows)
