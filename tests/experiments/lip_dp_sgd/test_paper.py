"""The whole command on small digits, and its page."""

import pytest
import torch

pytest.importorskip("experiments.harness.paper")

from experiments.harness.limits import Deadline
from experiments.harness.runner import Options, reproduce
from experiments.lip_dp_sgd import paper
from experiments.lip_dp_sgd.claims import METHODS

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("lip")
    lines = []
    figures = ("table-1", "2", "3")
    store = reproduce(Options("lip-dp-sgd", out, figures, quick=True), lines.append)
    return out, store, lines, figures


def test_every_row_has_its_tests(quick):
    _, store, _, _ = quick
    for method in METHODS:
        tests = [c for c in store.cells.values() if c["judged_by"] == "test" and f"/{method}/" in c["setting"]]
        assert len(tests) == 3 and all("failed" not in c for c in tests), tests


def test_all_methods_spend_the_same(quick):
    _, store, _, _ = quick
    spent = {round(c["epsilon"], 6) for c in store.cells.values() if c["judged_by"] == "test"}
    assert len(spent) == 1 and 7.9 < spent.pop() <= 8.0


def test_the_page_states_what_it_is(quick):
    out, _, _, _ = quick
    page = (out / "results.md").read_text()
    assert "quick run" in page and "## Table 1" in page and "## Figure 2" in page and "## Figure 3" in page
    assert "python -m experiments lip-dp-sgd" in page and "not run" not in page
    assert "## Figure 1" not in page


def test_a_second_command_runs_nothing_again(quick):
    out, _, _, figures = quick
    lines = []
    reproduce(Options("lip-dp-sgd", out, figures, quick=True), lines.append)
    assert not any("seed" in line for line in lines)


def test_convolutions_are_not_searched_for_batches_of_every_size(tmp_path, monkeypatch):
    """Each Poisson batch has another size: a search at every step cost more than the step, in time and memory."""
    seen = []

    def work(*_given):
        seen.append(torch.backends.cudnn.benchmark)
        return {}

    monkeypatch.setattr(paper, "work", work)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    options = Options("lip-dp-sgd", tmp_path, ("table-1",), quick=True)
    paper.train(next(paper.tasks(options, {})), options, Deadline(None), tmp_path)
    assert seen == [False]
