"""What is run, and in which order."""

from experiments.backprop_clipping.grid import EPSILONS, FIGURES, SIGNALS, asked, private_methods, rows
from experiments.backprop_clipping.search import SEARCH, Row, effort_of
from tests.experiments.backprop_clipping.made import everything

ROW = Row("mnist", "dp-sgd-tanh", 0.07)
KEY = "mnist/dp-sgd-tanh epsilon=0.07 epochs=5 learning_rate=0.0036575 max_norm=0.0561725"


def test_the_test_part_waits_for_all_trials_of_its_row() -> None:
    first = list(asked(("table-1",), False, 1, {}))
    assert {one.judged_by for one in first} == {"validation"}
    effort = effort_of(ROW, False)
    found = {}
    for trial in SEARCH.spread(ROW, effort.spread):
        found[f"validation {trial.key} seed=0"] = {"accuracy": 0.5, "loss": 1.0}
    of_row = [one for one in asked(("table-1",), False, 1, found) if one.row == ROW.label]
    of_row = [one for one in of_row if one.epsilon == ROW.epsilon]
    assert len(of_row) == effort.spread + effort.near and SEARCH.best(ROW, False, found) is None
    for trial in SEARCH.near(ROW, 0, effort.near):
        found[f"validation {trial.key} seed=0"] = {"accuracy": 0.4, "loss": 1.0}
    chosen = SEARCH.best(ROW, False, found)
    assert chosen == SEARCH.spread(ROW, effort.spread)[0]  # of equals the first
    tests = [one for one in asked(("table-1",), False, 1, found) if one.judged_by == "test"]
    assert [one.job for one in tests] == [chosen] * effort.seeds
    assert [one.seed for one in tests] == list(range(effort.seeds))


def test_a_trial_that_failed_is_not_chosen_and_does_not_stop_the_others() -> None:
    effort = effort_of(ROW, False)
    first = SEARCH.spread(ROW, effort.spread)
    found = {f"validation {t.key} seed=0": {"accuracy": 0.5, "loss": 1.0} for t in first}
    found[f"validation {first[0].key} seed=0"] = {"failed": "out of memory"}
    for trial in SEARCH.near(ROW, 1, effort.near):
        found[f"validation {trial.key} seed=0"] = {"accuracy": 0.6, "loss": 2.0}
    assert SEARCH.best(ROW, False, found) == SEARCH.near(ROW, 1, effort.near)[0]


def test_figure_5_takes_over_the_runs_of_the_table() -> None:
    of_table = set(everything(("table-1",), lambda _: 0.5))
    of_figure = set(everything(("5",), lambda _: 0.5))
    assert of_table < of_figure


def test_more_seeds_on_request() -> None:
    found = everything(("table-1",), lambda _: 0.5, quick=True, seeds=7)
    assert {cell["seed"] for cell in found.values() if cell["judged_by"] == "test"} == set(range(7))


def test_signals_have_the_setting_that_was_chosen() -> None:
    def accuracy(one: object) -> float:
        return 0.9 if "sgd" in one.key and "validation" in one.key else 0.5  # type: ignore[attr-defined]

    found = everything(("signal",), accuracy)
    keys = [key for key in found if "signal " in key]
    assert len(keys) == len(SIGNALS)
    per_layer, flat = (next(k for k in keys if f"/{m} " in k) for m in ("dp-sgd-layer", "dp-sgd-relu"))
    assert per_layer.replace("dp-sgd-layer", "dp-sgd-relu") == flat


def test_every_figure_has_runs() -> None:
    for figure in FIGURES:
        assert list(asked((figure,), False, 1, {})) and list(asked((figure,), True, 1, {}))
    counts = {data: len(rows("5", data)) for data in EPSILONS}
    assert counts == {"mnist": 3 + 10 * 6, "fashion_mnist": 3 + 10 * 5, "cifar10": 3 + 7 * 3, "digits": 3 + 3}


def test_grey_rows_are_tested_as_often_as_in_the_paper() -> None:
    for data, seeds in (("mnist", 10), ("fashion_mnist", 10), ("cifar10", 8)):
        assert effort_of(Row(data, "plain", None), False).seeds == seeds


def test_new_methods_are_on_grey_images_only() -> None:
    for method in ("gradient-clip-tanh", "dp-sgd-layer"):
        assert [m for m in ("mnist", "fashion_mnist", "cifar10") if method in private_methods(m)] == [
            "mnist",
            "fashion_mnist",
        ]


def test_runs_keep_their_keys() -> None:
    """Of results that are published: a row that is chosen by others would run again."""
    assert SEARCH.spread(ROW, 1)[0].key == KEY


def test_the_table_is_a_part_of_figure_5() -> None:
    for data in EPSILONS:
        assert set(rows("table-1", data)) <= set(rows("5", data))
