"""The whole command on small digits, and its page."""

import pytest

from clipwise.errors import ConfigurationError
from experiments.backprop_clipping.grid import private_methods
from experiments.harness.runner import Options, reproduce

pytestmark = pytest.mark.integration

FIGURES = ("table-1", "withdrawn")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("backprop")
    return out, reproduce(Options("backprop-clipping", out, FIGURES, quick=True), lambda _: None)


def test_every_row_has_its_tests_at_the_same_epsilon(quick):
    _, store = quick
    for method in private_methods("digits"):
        tests = [c for c in store.cells.values() if c["judged_by"] == "test" and f"/{method} " in c["setting"]]
        assert len(tests) == 2 and all("failed" not in c for c in tests), tests
        assert all(7.9 < c["epsilon"] <= 8.0 for c in tests)


def test_the_withdrawn_noise_is_charged_for_what_its_clips_allow(quick):
    _, store = quick
    spent = {c["setting"]: c["epsilon"] for c in store.cells.values() if "claimed_epsilon" in c}
    assert 0.08 < spent["withdrawn digits/honest"] < 0.1 < 20 < spent["withdrawn digits/as published"]


def test_the_page_states_what_it_is(quick):
    out, _ = quick
    page = (out / "results.md").read_text()
    assert "quick run" in page and "## Table 1" in page and "## The withdrawn setting" in page
    assert "python -m experiments backprop-clipping" in page and "not run" not in page
    assert "## Figure 5" not in page


def test_a_second_command_runs_nothing_again(quick):
    out, _ = quick
    words = []
    reproduce(Options("backprop-clipping", out, FIGURES, quick=True), words.append)
    assert not any("seed" in line for line in words)


def test_runs_are_not_cut_to_fewer_epochs(tmp_path):
    with pytest.raises(ConfigurationError, match="--epochs is not possible"):
        reproduce(Options("backprop-clipping", tmp_path, quick=True, epochs=1), lambda _: None)


def test_a_missing_data_set_ends_the_command(tmp_path):
    with pytest.raises(ConfigurationError, match="mnist"):
        reproduce(Options("backprop-clipping", tmp_path, ("table-1",), data=tmp_path), lambda _: None)
