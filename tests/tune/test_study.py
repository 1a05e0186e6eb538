"""A study finds good settings, continues after a stop, and reports its cost."""

import json

import pytest

from clipwise.errors import ConfigurationError
from clipwise.tune import Choice, Range, study
from clipwise.tune.subject import Score, Subject, front

optuna = pytest.importorskip("optuna")


def toy(score=None):
    """The best accuracy is at x = 0.7, and epsilon is y."""
    space = {"x": Range(0, 1), "y": Range(0.5, 8, log=True), "kind": Choice(("a", "b")), "n": Range(1, 9, whole=True)}
    good = lambda s: Score(1 - (s["x"] - 0.7) ** 2, s["y"], 1e-5, (1.0 + s["y"], 0.1, 10))  # noqa: E731
    return Subject("toy", space, score or good)


def quiet(text):
    pass


def test_all_trials_lie_in_the_space_and_the_front_is_of_them(tmp_path):
    found = study.search(toy(), 12, tmp_path, quiet)
    assert len(found) == 12
    for p in found:
        assert 0 <= p.settings["x"] <= 1 and 0.5 <= p.epsilon <= 8
        assert p.settings["kind"] in ("a", "b") and isinstance(p.settings["n"], int)
        assert p.accuracy == pytest.approx(1 - (p.settings["x"] - 0.7) ** 2)
    assert {p.number for p in front(found)} <= {p.number for p in found}


def test_a_study_continues_and_does_not_repeat_itself(tmp_path):
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

    lines = []
    assert len(study.search(toy(sometimes), 3, tmp_path, lines.append)) == 3
    assert any("not this one" in line for line in lines)


def test_a_search_in_which_every_run_fails_reports_the_reason(tmp_path):
    def never(settings):
        raise ConfigurationError("no such layer")

    with pytest.raises(ConfigurationError, match="no such layer"):
        study.search(toy(never), 2, tmp_path, quiet)


def test_what_is_written(tmp_path):
    found = study.search(toy(), 6, tmp_path, quiet)
    files = study.write("toy", found, tmp_path)
    stored = json.loads((tmp_path / "toy" / "results.json").read_text())
    assert len(stored["trials"]) == 6 and set(stored["front"]) <= set(range(6))
    page = (tmp_path / "toy" / "front.md").read_text()
    assert page.count("\n| ") == 1 + len(stored["front"])
    assert "no guarantee" in page and "all 6 models would cost" in page
    assert all(file.exists() for file in files)


def of_space(**space):
    return Subject("toy", space, lambda settings: Score(0.5, 1.0))


BEGUN = {"lr": Range(0, 1), "kind": Choice(("a", "b"))}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"rate": Range(0, 1), "kind": Choice(("a", "b"))}, r"at ('lr', 'rate'|'rate', 'lr')\."),
        ({"lr": Range(0, 2), "kind": Choice(("a", "b"))}, r"at 'lr'\."),
        ({"lr": Range(0, 1), "kind": Choice(("a", "c"))}, r"at 'kind'\."),
        ({"lr": Choice((1,)), "kind": Choice(("a", "b"))}, r"at 'lr'\."),
        ({"lr": Range(0, 1)}, r"at 'kind'\."),
    ],
)
def test_another_space_is_refused_and_nothing_is_lost(tmp_path, space, message):
    before = study.search(of_space(**BEGUN), 2, tmp_path, quiet)
    with pytest.raises(ConfigurationError, match=message + r".* Give another folder with --out\."):
        study.search(of_space(**space), 5, tmp_path, quiet)
    with pytest.raises(ConfigurationError, match="SPACE has changed since"):  # even if no run is left
        study.search(of_space(**space), 1, tmp_path, quiet)
    assert study.search(of_space(**dict(reversed(BEGUN.items()))), 2, tmp_path, quiet) == before


def test_a_space_may_change_until_a_run_has_finished(tmp_path):
    def never(settings):
        raise ConfigurationError("a mistake")

    with pytest.raises(ConfigurationError, match="a mistake"):
        study.search(Subject("toy", {"kind": Choice((1, 2))}, never), 2, tmp_path, quiet)
    assert len(study.search(of_space(kind=Choice((1, 2, 3))), 2, tmp_path, quiet)) == 2
    with pytest.raises(ConfigurationError, match="SPACE has changed since"):
        study.search(of_space(kind=Choice((1, 2))), 3, tmp_path, quiet)


def of_an_earlier_version(folder):
    """Two finished trials, and no description of the space."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna.Study, "set_user_attr", lambda *_: None)
        study.search(of_space(**BEGUN), 2, folder, quiet)


def test_a_study_without_a_description_is_not_continued(tmp_path):
    of_an_earlier_version(tmp_path)
    with pytest.raises(ConfigurationError, match=r"at .*'kind'"):
        study.search(of_space(**BEGUN), 3, tmp_path, quiet)


def test_studies_that_share_a_folder_keep_their_results(tmp_path):
    found = study.search(toy(), 2, tmp_path, quiet)
    places = {"digits/none/lip": "digits-none-lip", "digits/none/dp-sgd": "digits-none-dp-sgd", "..": "--"}
    for name, place in places.items():
        files = study.write(name, found, tmp_path)
        assert {file.parent for file in files} == {tmp_path / place}
        assert json.loads((tmp_path / place / "results.json").read_text())["study"] == name
