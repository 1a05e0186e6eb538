"""Black-box attacks: metrics of scores, and a model that reveals its members."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from clipwise import audit, make_private
from clipwise.audit.membership import curve
from clipwise.errors import AuditError, ConfigurationError
from tests.audit.bug import losses, rows, small

scores = st.lists(st.integers(-5, 5), min_size=1, max_size=30).map(lambda found: np.array(found, dtype=float))


@given(scores, scores)
def test_the_area_is_the_share_of_pairs_in_order(members: Any, others: Any) -> None:
    expected = stats.mannwhitneyu(members, others).statistic / (len(members) * len(others))
    assert curve("a", members, others).auc == pytest.approx(expected)


@given(scores, scores, st.floats(0.0, 0.9))
def test_no_more_false_alarms_than_accepted(members: Any, others: Any, rate: float) -> None:
    found = curve("a", members, others, (rate,)).found[rate]
    reachable = [float((members > t).mean()) for t in [*others, -np.inf] if (others > t).sum() <= rate * len(others)]
    assert found == pytest.approx(max(reachable))


def test_perfect_and_useless_scores() -> None:
    ones, zeros = np.ones(50), np.zeros(50)
    assert audit.loss_threshold(zeros, ones).found[0.001] == 1.0
    assert audit.loss_threshold(ones, ones).found[0.001] == 0.0
    assert audit.loss_threshold(ones, ones).auc == 0.5
    with pytest.raises(ConfigurationError, match="at least one score of each"):
        audit.loss_threshold(np.zeros(0), ones)


def test_the_likelihood_ratio_allows_for_hard_records() -> None:
    """Each record has its own level of loss, and membership lowers it slightly: only a ratio per record shows it."""
    random = np.random.default_rng(0)
    models, records = 17, 400
    is_member = random.random((models, records)) < 0.5
    level = 5 * random.random(records)
    found = level - 0.5 * is_member + 0.1 * random.normal(size=(models, records))
    by_ratio = audit.likelihood_ratio(found, is_member)
    by_threshold = audit.loss_threshold(found[0][is_member[0]], found[0][~is_member[0]])
    assert by_ratio.auc > 0.98 and by_ratio.found[0.01] > 0.8
    assert by_threshold.auc < 0.7
    assert "likelihood ratio: finds" in str(by_ratio)


def test_too_few_models_to_compare_with_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="give more"):
        audit.likelihood_ratio(np.zeros((3, 4)), np.ones((3, 4), dtype=bool))


@pytest.mark.slow
def test_a_model_that_memorizes_reveals_its_members() -> None:
    torch.manual_seed(0)
    # More features than records: any labels can be learned.
    data = torch.utils.data.TensorDataset(torch.randn(60, 80), torch.randint(2, (60,)))

    def train(z: float, dataset: Any) -> None:
        model = nn.Linear(80, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        private = make_private(model, optimizer, dataset, sampling="full", noise_multiplier=z, steps=20)
        for _ in range(20):
            for x, y in private.loader:
                private.step(losses(model, x, y))

    for attack in audit.membership(partial(train, 0.01), data, losses, models=8):
        assert attack.auc > 0.8, attack
    for attack in audit.membership(partial(train, 50.0), data, losses, models=8):
        assert abs(attack.auc - 0.5) < 0.25, attack


def test_what_cannot_be_attacked_is_refused() -> None:
    make_run, data = small(sampling="fixed-size", sample_rate=None, batch_size=8)
    with pytest.raises(ConfigurationError, match="leaves records out of batches"):
        audit.membership(make_run, data, losses)
    with pytest.raises(ConfigurationError, match="models must be"):
        audit.membership(make_run, data, losses, models=2)
    with pytest.raises(AuditError, match="made no private run"):
        audit.membership(lambda dataset: None, torch.utils.data.TensorDataset(*rows()), losses)
