"""Private estimators: scikit-learn's own checks, utility and privacy."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clipwise

pytest.importorskip("sklearn")
from sklearn.datasets import load_breast_cancer, make_blobs
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator

from clipwise.integrations.sklearn import PrivateClassifier, PrivateRegressor

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::clipwise.PrivacyWarning"),
]

# A budget that does not move the results of checks which compare scores with those of ordinary estimators.
LOOSE = {"epsilon": 50.0, "epochs": 3, "learning_rate": 0.2}


def checks() -> list[Any]:
    found = []
    for estimator in (PrivateClassifier(**LOOSE), PrivateRegressor(**LOOSE)):
        for made, check in estimator_checks_generator(estimator):
            name = getattr(check, "func", check).__name__
            found.append(pytest.param(made, check, id=f"{type(estimator).__name__}-{name}"))
    return found


@pytest.mark.parametrize(("estimator", "check"), checks())
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_it_equals_the_plain_loop() -> None:
    X, y = make_blobs(60, centers=3, n_features=4, random_state=0)
    X = X.astype(np.float32) / 10
    found = PrivateClassifier(epsilon=3.0, delta=1e-3, epochs=2, batch_size=12, random_state=5).fit(X, y)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 3))
    private = clipwise.make_private(
        model, torch.optim.Adam(model.parameters(), lr=0.05), TensorDataset(torch.tensor(X), torch.tensor(y)),
        batch_size=12, epochs=2, epsilon=3.0, delta=1e-3, seed=5,
    )  # fmt: skip
    for _ in range(2):
        for x, labels in private.loader:
            private.step(F.cross_entropy(model(x), labels, reduction="none") if len(x) else None)
    for mine, other in zip(found.module_.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert found.privacy_.epsilon == private.spent().epsilon <= 3.0
    assert found.n_iter_ == 10


def test_it_learns_at_a_usual_budget() -> None:
    data = load_breast_cancer()
    scale = FunctionTransformer(lambda X: X / np.abs(data.data).max(0))
    model = make_pipeline(scale, PrivateClassifier(epsilon=3.0, classes=[0, 1], feature_range=(0, 1)))
    assert cross_val_score(model, data.data, data.target, cv=3).mean() > 0.8


def test_regression_with_a_network() -> None:
    random = np.random.default_rng(0)
    X = random.uniform(-1, 1, (600, 2))
    y = 10 + 5 * X[:, 0] - 3 * X[:, 1]
    model = PrivateRegressor(epsilon=8.0, target_range=(0, 20), hidden_layer_sizes=(8,), epochs=40).fit(X, y)
    assert model.score(X, y) > 0.5
    assert "epsilon" in model.statement_


def test_random_layers_draw_from_the_key_of_the_run() -> None:
    def network(features: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 6), nn.Dropout(0.5), nn.Linear(6, outputs))

    X, y = make_blobs(60, centers=2, n_features=4, random_state=0)
    torch.manual_seed(1)  # known
    found = PrivateClassifier(epochs=1, classes=[0, 1], module=network).fit(X, y)
    assert "user seeded" not in found.statement_


def test_classes_that_are_given_are_not_read_from_the_labels() -> None:
    X, y = make_blobs(40, centers=2, n_features=3, random_state=0)
    model = PrivateClassifier(epochs=1, classes=[0, 1, 2]).fit(X, y)
    assert model.predict_proba(X).shape == (40, 3)
    with pytest.raises(clipwise.ConfigurationError, match="classes"):
        PrivateClassifier(classes=[0, 2]).fit(X, y)


def test_classes_from_the_labels_are_warned_about() -> None:
    X, y = make_blobs(40, centers=2, n_features=3, random_state=0)
    with pytest.warns(clipwise.PrivacyWarning, match="classes"):
        PrivateClassifier(epochs=1).fit(X, y)


def test_it_clones_for_a_search() -> None:
    X, y = make_blobs(60, centers=2, n_features=3, random_state=0)
    search = GridSearchCV(PrivateClassifier(epochs=1), {"max_norm": [0.5, 1.0]}, cv=2).fit(X, y)
    assert set(search.best_params_) == {"max_norm"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_range": (1, 0)}, "feature_range"),
        ({"target_range": (1, 1)}, "target_range"),
        ({"module": nn.Linear(2, 1)}, "module must be a function"),
        ({"random_state": np.random.RandomState(0)}, "random_state"),
        ({"epsilon": 0}, "epsilon"),
        ({"batch_size": 0}, "batch_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    X = np.random.default_rng(0).uniform(-1, 1, (20, 2))
    with pytest.raises(clipwise.ConfigurationError, match=message):
        PrivateRegressor(**options).fit(X, X[:, 0])


def test_each_feature_may_have_its_own_range() -> None:
    X, y = np.random.default_rng(0).uniform(-1, 1, (40, 2)), np.arange(40) % 2
    found = [
        PrivateClassifier(epochs=1, random_state=0, feature_range=bounds).fit(rows, y).predict_proba(rows)
        for rows, bounds in ((X, (-1, 1)), (X * [1, 100] + [0, 50], (np.array([-1, -50]), [1, 150])))
    ]
    np.testing.assert_allclose(*found, rtol=1e-4)


@pytest.mark.parametrize("bounds", [([0, 0], [1, 0]), ([0] * 3, [1] * 3), (0, np.inf), "auto", 1.0])
def test_a_wrong_range_is_named(bounds: Any) -> None:
    X = np.random.default_rng(0).uniform(-1, 1, (20, 2))
    with pytest.raises(clipwise.ConfigurationError, match=r"feature_range must be .*each of the 2 features"):
        PrivateRegressor(feature_range=bounds).fit(X, X[:, 0])


def test_one_hidden_layer_may_be_a_number() -> None:
    X, y = make_blobs(40, centers=2, n_features=3, random_state=0)
    model = PrivateClassifier(epochs=1, hidden_layer_sizes=5).fit(X, y)
    assert [p.shape[0] for p in model.module_.parameters()] == [5, 5, 2, 2]
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
