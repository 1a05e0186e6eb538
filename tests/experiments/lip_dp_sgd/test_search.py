"""Every method gets the same trials, of the same number, in a space that fits it."""

import pytest

from clipwise.tune import Range
from experiments.lip_dp_sgd.claims import METHODS, NORMS, TABLES
from experiments.lip_dp_sgd.grid import image_rows, table_rows
from experiments.lip_dp_sgd.search import SEARCH, Row, space

ROWS = [*table_rows("table-5", quick=False), *image_rows(quick=False)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_trials_differ_and_lie_in_the_space(row):
    trials = [*SEARCH.spread(row, 20), *SEARCH.near(row, 3, 10)]
    assert len({t.key for t in trials}) == 30
    for name, dimension in space(row).items():
        for trial in trials:
            value = getattr(trial, name)
            if isinstance(dimension, Range):
                assert dimension.low <= value <= dimension.high
            else:
                assert value in dimension.values
    assert {t.epsilon for t in trials} == {row.epsilon}


@pytest.mark.parametrize("norm", NORMS)
def test_methods_differ_in_what_is_clipped_alone(norm):
    """What the methods share is tried at the same values; C spans the range of each."""
    of = {m: SEARCH.spread(Row("adult", norm, m, 1.0), 12) for m in METHODS}
    for trials in zip(*of.values(), strict=True):
        shared = {(t.learning_rate, t.sample_rate, t.epochs, t.alpha) for t in trials}
        assert len(shared) == 1


def test_trials_spread_over_every_dimension():
    trials = SEARCH.spread(Row("adult", "bounded", "dp-sgd", 1.0), 20)
    assert len({t.sample_rate for t in trials}) == 3 and len({t.epochs for t in trials}) == 2
    assert min(t.max_norm for t in trials) < 0.3 and max(t.max_norm for t in trials) > 8
    assert min(t.learning_rate for t in trials) < 2e-3 and max(t.learning_rate for t in trials) > 5e-2


def test_second_trials_are_near_the_best():
    row = Row("adult", "none", "dp-sgd", 1.0)
    best = SEARCH.spread(row, 20)[7]
    for trial in SEARCH.near(row, 7, 10):
        assert 1 / 4 < trial.max_norm / best.max_norm < 4


def test_the_paper_has_seven_tables_and_every_one_has_a_row():
    assert len(TABLES) == 7
    assert len(table_rows("table-1", quick=False)) == 21 and len(table_rows("table-5", quick=False)) == 42


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_networks_for_images_begin_with_orthogonal_weights_whatever_the_method(row):
    is_image = row in image_rows(quick=False)
    assert {t.first_weights for t in SEARCH.spread(row, 3)} == {"orthogonal" if is_image else "usual"}


def test_dp_sgd_also_has_networks_whose_windows_overlap():
    others = [row for row in image_rows(quick=False) if row.network]
    assert {(row.data, row.norm, row.method, row.network) for row in others} == {
        (data, norm, "dp-sgd", network)
        for data, network in (("fashion_mnist", "convnet6"), ("cifar10", "shallow_vgg"))
        for norm in ("none", "bounded")
    }
    assert len({row.label for row in ROWS}) == len(set(ROWS))
    for row in others:
        own = Row(row.data, row.norm, row.method, row.epsilon)
        for trial, usual in zip(SEARCH.spread(row, 3), SEARCH.spread(own, 3), strict=True):
            assert trial == usual.but(network=row.network) and trial.key != usual.key
