"""Private estimators with the interface of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise.clipping import PerExample
from clipwise.engine.make_private import make_private
from clipwise.errors import ConfigurationError, warn

Array = NDArray[Any]
Bound: TypeAlias = "float | Sequence[float] | Array"


@dataclass(eq=False, repr=False)
class _PrivateEstimator(BaseEstimator):  # type: ignore[misc]
    """Training and attributes of both estimators."""

    epsilon: float = 3.0
    _: KW_ONLY
    delta: float | None = None
    max_norm: float = 1.0
    batch_size: int | None = None
    epochs: float = 20
    learning_rate: float = 0.05
    hidden_layer_sizes: int | Sequence[int] = ()
    module: Callable[[int, int], nn.Module] | None = None
    feature_range: tuple[Bound, Bound] | None = None
    random_state: int | None = None

    def _train(self, X: Array, targets: Tensor, outputs: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        records = len(X)
        delta = min(1e-5, 0.1 / records) if self.delta is None else self.delta
        with torch.random.fork_rng(devices=[]):
            # The initial weights are public.
            torch.manual_seed(0 if self.random_state is None else _seed(self.random_state))
            self.module_ = self._build(X.shape[1], outputs)
        optimizer = torch.optim.Adam(self.module_.parameters(), lr=self.learning_rate)
        private = make_private(
            self.module_,
            optimizer,
            TensorDataset(self._scaled(X), targets),
            batch_size=min(records, max(1, records // 10) if self.batch_size is None else self.batch_size),
            epochs=self.epochs,
            epsilon=self.epsilon,
            delta=delta,
            clipping=PerExample(max_norm=self.max_norm),
            seed=None if self.random_state is None else _seed(self.random_state),
            loss=lambda x, y: loss(self.module_(x), y),
        )
        with private:
            while private.steps < _planned(self.epochs, len(private.loader)):
                for x, y in private.loader:
                    with private.randomness():
                        losses = loss(self.module_(x), y) if len(x) else None
                    private.step(losses)
                    if private.steps == _planned(self.epochs, len(private.loader)):
                        break
            self.privacy_ = private.spent()
            self.statement_ = str(private.statement())
        self.n_iter_ = private.steps
        self.module_.eval()

    def _build(self, features: int, outputs: int) -> nn.Module:
        if isinstance(self.module, nn.Module):
            raise ConfigurationError(
                "module must be a function from the numbers of features and outputs to a new torch module, not a "
                "module: each fit begins with new weights."
            )
        if self.module is not None:
            return self.module(features, outputs)
        layers: list[nn.Module] = []
        for size in np.atleast_1d(self.hidden_layer_sizes).astype(int).tolist():
            layers += [nn.Linear(features, size), nn.Tanh()]
            features = size
        return nn.Sequential(*layers, nn.Linear(features, outputs))

    def _scaled(self, X: Array) -> Tensor:
        """Features in [-1, 1], by the public range; as they are without one."""
        x = torch.tensor(X, dtype=torch.float32)
        if self.feature_range is None:
            return x
        low, high = _range("feature_range", self.feature_range, x.shape[1])
        return ((x.clamp(low, high) - low) / (high - low) * 2 - 1).float().contiguous()

    def _outputs(self, X: Array) -> Tensor:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        with torch.no_grad():
            found: Tensor = self.module_(self._scaled(X))
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None  # noise and samples come from the operating system
        return tags


@dataclass(eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, _PrivateEstimator):  # type: ignore[misc]
    """A classifier trained with DP-SGD: linear by default, or a network.

    The number of rows and the set of classes are public. Everything else that `fit` publishes is (epsilon, delta)-DP,
    with one row of X and y as the unit. Rows are not standardised, since means and variances of private data would not
    be private: scale the features by public constants, or give `feature_range`.

    Args:
        epsilon: the privacy budget of one `fit`. Each further `fit` on the same data spends it again.
        delta: by default the smaller of 1e-5 and 1 / (10 n).
        max_norm: the clipping norm of one row's gradient.
        batch_size: the expected batch size; by default a tenth of the rows.
        epochs: the length of the training.
        learning_rate: of Adam.
        hidden_layer_sizes: the widths of hidden layers; none for a linear model.
        module: a function from the numbers of features and outputs to a torch module, in place of those layers.
        feature_range: public bounds (low, high) of the features, which are clamped and scaled to [-1, 1]. Each is a
            number, or a sequence with one number for each feature.
        random_state: a seed, for tests. It makes the noise known: no guarantee is claimed then.
        classes: the classes, if they are not to be taken from y.

    Attributes:
        privacy_: the privacy spent by `fit`, a `clipwise.Spent`.
        statement_: the privacy statement.
        module_: the torch module.
        classes_, n_features_in_, n_iter_: as in scikit-learn.
    """

    classes: Sequence[Any] | None = None

    def fit(self, X: Any, y: Any) -> PrivateClassifier:
        """Train on the rows of X with the labels y."""
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        if self.classes is None:
            warn(
                "The classes are taken from y. A class that only some rows have would reveal them: give classes=[...] "
                "if the set of classes is not public."
            )
        self.classes_ = np.unique(y if self.classes is None else np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise ValueError("PrivateClassifier needs samples of at least 2 classes, and the data has one class.")
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not np.array_equal(self.classes_[places], y):
            raise ConfigurationError("y has a label that is not among classes=[...].")
        self._train(X, torch.as_tensor(places, dtype=torch.long), len(self.classes_), _cross_entropy)
        return self

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, in the order of `classes_`."""
        found: Array = self._outputs(X).double().softmax(1).numpy()
        return found

    def decision_function(self, X: Any) -> Array:
        """The score of each class; for two classes that of the second one."""
        scores = self._outputs(X).double()
        found: Array = (scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores).numpy()
        return found

    def predict(self, X: Any) -> Array:
        """The most probable class of each row."""
        places = self._outputs(X).argmax(1).numpy()
        found: Array = self.classes_[places]
        return found


@dataclass(eq=False, repr=False)
class PrivateRegressor(RegressorMixin, _PrivateEstimator):  # type: ignore[misc]
    """A regressor trained with DP-SGD on the squared error: linear by default, or a network.

    Arguments and attributes are those of `PrivateClassifier` without `classes`, plus `target_range`.

    Args:
        target_range: public bounds (low, high) of y, which is clamped and scaled to [-1, 1] in training.
    """

    target_range: tuple[float, float] | None = None

    def fit(self, X: Any, y: Any) -> PrivateRegressor:
        """Train on the rows of X with the targets y."""
        X, y = validate_data(self, X, y, y_numeric=True)
        targets = torch.tensor(np.asarray(y, dtype=np.float64), dtype=torch.float32)
        if self.target_range is not None:
            low, high = _range("target_range", self.target_range)
            targets = (targets.clamp(low, high) - low) / (high - low) * 2 - 1
        self._train(X, targets, 1, _squared_error)
        return self

    def predict(self, X: Any) -> Array:
        """The prediction for each row."""
        low, high = (-1.0, 1.0) if self.target_range is None else self.target_range
        found: Array = ((self._outputs(X)[:, 0].double() + 1) / 2 * (high - low) + low).numpy()
        return found


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def _range(name: str, given: tuple[Any, Any], size: int = 1) -> tuple[Tensor, Tensor]:
    """The bounds, of shape () or (size,)."""
    try:
        low, high = (torch.tensor(np.asarray(bound, dtype=np.float64)) for bound in given)
        is_right = bool(((low < high) & (high - low).isfinite()).all()) and {low.shape, high.shape} <= {(), (size,)}
    except (TypeError, ValueError, RuntimeError):
        is_right = False
    if not is_right:
        entries = "two numbers" if size == 1 else f"each a number or one number for each of the {size} features"
        raise ConfigurationError(f"{name} must be (low, high) with low < high, {entries}.")
    return low, high


def _planned(epochs: float, steps_per_epoch: int) -> int:
    return int(np.ceil(epochs * steps_per_epoch))


def _seed(random_state: Any) -> int:
    if isinstance(random_state, (int, np.integer)):
        return int(random_state)
    raise ConfigurationError("random_state must be a whole number or None.")
