"""The order of runs: trials, then trials near the best, then tests of the best; the test part is not read before."""

from experiments.lip_dp_sgd.grid import asked, table_rows
from experiments.lip_dp_sgd.search import SEARCH, effort_of


def played(figures, quick, score, seeds=None):
    """Do all requested runs with invented results; returns them in order."""
    found, order = {}, []
    while True:
        new = [a for a in asked(figures, quick, found, seeds) if a.key not in found]
        if not new:
            return found, order
        found[new[0].key] = score(new[0])
        order.append(new[0])


def by_norm(one):
    """The larger C is, the better."""
    job = getattr(one.job, "trial", one.job)
    return {"accuracy": getattr(job, "max_norm", 0.5) / 20, "loss": 1.0}


def test_tests_come_after_all_trials_of_their_row_and_with_the_best_of_them():
    found, order = played(("table-1",), True, by_norm)
    for row in table_rows("table-1", quick=True):
        of_row = [a for a in order if a.row == row.label]
        kinds = [a.judged_by for a in of_row]
        effort = effort_of(row, quick=True)
        assert kinds == ["validation"] * (effort.spread + effort.near) + ["test"] * 3
        trials = [a.job for a in of_row if a.judged_by == "validation"]
        assert {a.job for a in of_row if a.judged_by == "test"} == {max(trials, key=lambda t: t.max_norm)}
        assert SEARCH.best(row, True, found) == max(trials, key=lambda t: t.max_norm)


def test_second_trials_surround_the_best_of_the_first():
    _, order = played(("table-1",), True, by_norm)
    row = table_rows("table-1", quick=True)[0]
    effort = effort_of(row, quick=True)
    first = SEARCH.spread(row, effort.spread)
    winner = max(range(len(first)), key=lambda i: first[i].max_norm)
    tried = [a.job for a in order if a.row == row.label and a.judged_by == "validation"]
    assert tried[effort.spread :] == list(SEARCH.near(row, winner, effort.near))


def test_requested_seeds_count_in_tables_and_figures():
    for figure in ("table-1", "1", "4"):
        _, order = played((figure,), True, by_norm, seeds=2)
        assert {a.seed for a in order if a.judged_by == "test"} == {0, 1}


def test_equal_accuracies_are_ordered_by_loss():
    losses = iter(range(10_000, 0, -1))
    found, order = played(("table-1",), True, lambda one: {"accuracy": 0.5, "loss": float(next(losses))})
    row = table_rows("table-1", quick=True)[0]
    last = [a.job for a in order if a.row == row.label and a.judged_by == "validation"][-1]
    assert SEARCH.best(row, True, found) == last


def test_failed_and_unfinished_trials_are_not_chosen():
    row = table_rows("table-1", quick=True)[0]
    _, order = played(("table-1",), True, lambda one: {"failed": "no"})
    assert {a.judged_by for a in order} == {"validation"}
    found, _ = played(("table-1",), True, by_norm)
    key = next(k for k in found if k.startswith("validation"))
    assert SEARCH.best(row, True, found | {key: {"unfinished": True}}) is None


def test_every_method_gets_as_many_trials_and_tests():
    _, order = played(("table-5",), True, by_norm)
    counts = {}
    for one in order:
        counts[one.row, one.judged_by] = counts.get((one.row, one.judged_by), 0) + 1
    assert {n for (_, judged), n in counts.items() if judged == "validation"} == {3}
    assert {n for (_, judged), n in counts.items() if judged == "test"} == {3}


def test_tables_share_their_runs():
    _, once = played(("table-1",), True, by_norm)
    _, both = played(("table-1", "table-5"), True, by_norm)
    _, five = played(("table-5",), True, by_norm)
    assert len(both) == len(five) > len(once)


def test_all_figures_can_be_selected():
    found, order = played((), True, by_norm)
    assert {a.figure for a in order} >= {"table-1", "table-5", "1", "2", "3", "4"}
    assert len(found) == len(order)


def test_figure_4_tests_averages_of_the_setting_of_figure_1():
    _, order = played(("1", "4"), True, by_norm)
    chosen = {a.job.but(averaged=None) for a in order if a.figure == "4" and a.judged_by == "test"}
    assert chosen <= {a.job for a in order if a.figure == "1" and a.judged_by == "test"}
    assert all(a.job.averaged for a in order if a.figure == "4" and a.judged_by == "test")
