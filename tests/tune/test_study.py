"""A study: it finds what is good, goes on where it stopped, and says what it costs."""

import json

import pytest

from clipwise.errors import ConfigurationError
from clipwise.tune import Choice, Range, report, study
from clipwise.tune.front import front
from clipwise.tune.subject import Score, Subject, of_script

pytest.importorskip("optuna")


def toy(score=None):
    """The best accuracy is at x = 0.7, and epsilon is y."""
    space = {
        "x": Range(0, 1),
        "y": Range(0.5, 8, log=True),
        "kind": Choice(("a", "b")),
        "n": Range(1, 9, whole=True),
    }
    good = lambda s: Score(1 - (s["x"] - 0.7) ** 2, s["y"], 1e-5, (1.0 + s["y"], 0.1, 10))  # noqa: E731
    return Subject("toy", space, score or good)


def quiet(text):
    pass


def test_all_trials_lie_in_the_space_and_the_front_is_of_them(tmp_path):
    found = study.search(toy(), 12, tmp_path, quiet)
    assert len(found) == 12
    for p, _ in found:
        assert 0 <= p.settings["x"] <= 1 and 0.5 <= p.epsilon <= 8
        assert p.settings["kind"] in ("a", "b") and isinstance(p.settings["n"], int)
        assert p.accuracy == pytest.approx(1 - (p.settings["x"] - 0.7) ** 2)
    assert {p.number for p in front([p for p, _ in found])} <= {p.number for p, _ in found}


def test_a_study_goes_on_and_does_not_repeat_itself(tmp_path):
    calls = []
    noted = toy(lambda s: calls.append(s["x"]) or Score(s["x"], 1.0))
    study.search(noted, 3, tmp_path, quiet)
    found = study.search(noted, 5, tmp_path, quiet)
    assert len(found) == 5 and len(calls) == 5 and len(set(calls)) == 5
    study.search(noted, 4, tmp_path, quiet)
    assert len(calls) == 5


def test_a_run_that_is_refused_does_not_end_the_search(tmp_path):
    count = []

    def sometimes(settings):
        count.append(1)
        if len(count) == 2:
            raise ConfigurationError("not this one")
        return Score(0.5, 1.0)

    told = []
    assert len(study.search(toy(sometimes), 3, tmp_path, told.append)) == 3
    assert any("not this one" in line for line in told)


def test_a_search_in_which_all_fails_says_why(tmp_path):
    def never(settings):
        raise ConfigurationError("no such layer")

    with pytest.raises(ConfigurationError, match="no such layer"):
        study.search(toy(never), 2, tmp_path, quiet)


def test_what_is_written(tmp_path):
    found = study.search(toy(), 6, tmp_path, quiet)
    files = report.write("toy", found, tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert len(stored["trials"]) == 6 and set(stored["front"]) <= set(range(6))
    page = (tmp_path / "front.md").read_text()
    assert page.count("\n| ") == 1 + len(stored["front"])
    assert "no guarantee" in page and "all 6 models would cost" in page
    assert all(file.exists() for file in files)


SCRIPT = """
from clipwise.tune import Range
SPACE = {"x": Range(0, 1)}
def train(settings):
    return settings["x"], 2.0
if __name__ == "__main__":
    raise SystemExit("not to be run")
"""


def test_a_script_is_tuned(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    subject = of_script(tmp_path / "mine.py")
    assert subject.name == "mine" and subject.score({"x": 0.25}) == Score(0.25, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "must define SPACE"),
        ("SPACE = {'x': 3}\ndef train(s): return 1, 1", r"SPACE\['x'\] is int"),
    ],
)
def test_a_script_that_does_not_fit_is_refused(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        of_script(tmp_path / "mine.py")


@pytest.mark.parametrize("returned", ["1", "(1, 2, 3)", "('a', 2)", "(0.5, -1)", "(float('nan'), 1)"])
def test_what_a_script_returns_is_checked(tmp_path, returned):
    (tmp_path / "mine.py").write_text(
        f"from clipwise.tune import Range\nSPACE = {{'x': Range(0, 1)}}\ndef train(s): return {returned}"
    )
    with pytest.raises(ConfigurationError, match=r"train\(settings\)"):
        of_script(tmp_path / "mine.py").score({"x": 0.5})


def test_a_missing_script_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="does not exist"):
        of_script(tmp_path / "none.py")
