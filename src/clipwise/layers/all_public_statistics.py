"""All `PublicStatistics` of a model behind one interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.layers.public_statistics import PublicStatistics


class AllPublicStatistics:
    """Every `PublicStatistics` of a model. Each may belong to a part of it, such as one of two encoders.

    Each part has its own public rows, so no statistics depend on another part's weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._each = model, PublicStatistics.all_of(model)

    def __bool__(self) -> bool:
        return bool(self._each)

    def refresh(self, force: bool = False) -> None:
        """Recompute the statistics after a change of the weights; see `PublicStatistics.refresh`."""
        for statistics in self._each:
            statistics.refresh(force)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Treat the statistics as fresh inside this block; see `PublicStatistics.held`."""
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
        """Refuse "public-exact" layers for which these parameters lack what `correct` needs."""
        for statistics in self._each:
            statistics.require_correctable(self._model, parameters)

    def correct(self, gradients: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> Mapping[str, Tensor]:
        """Add the gradient through the public statistics to the released gradients.

        Parts share no scale or shift, so the order of the parts does not matter.
        """
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
