import math

import pytest

from clipwise.errors import ConfigurationError
from clipwise.recipes import toml
from clipwise.recipes.config import Choices, choices_of, read_choices
from clipwise.recipes.kind import Settings


def write(path, text):
    path.write_text(text)
    return path


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = write(tmp_path / "c.toml", '[privacy]\nepsilon = 2\n[training]\nepochs = 7\n[data]\nlabels = ["a", "b"]\n')
    found = choices_of({"path": "x.csv", "epochs": 9.0, "batch_size": None}, file)
    assert (found.epsilon, found.epochs, found.labels, found.path) == (2, 9.0, ("a", "b"), "x.csv")
    assert found.batch_size is None and found.hold_out == 0.1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training]\nepoch = 3\n", r"'epoch' in \[training\]"),
        ("[trainings]\nepochs = 3\n", r"\[trainings\] is not known"),
        ("epochs = 3\n", r"\[epochs\] is not known"),
        ('[training]\nepochs = "many"\n', "--epochs must be a number"),
        ("[training]\nbatch_size = 2.5\n", "--batch-size must be a whole number"),
        ("[training]\nbatch_size = true\n", "--batch-size must be a whole number"),
        ('[data]\nlabels = "no,yes"\n', "--labels must be a list of texts"),
        ("[data]\nlabels = [0, 1]\n", "--labels must be a list of texts"),
        ('[data]\nbalanced = "yes"\n', "--balanced must be true or false"),
    ],
)
def test_an_unknown_key_is_named(tmp_path, text, words):
    with pytest.raises(ConfigurationError, match=words):
        choices_of({}, write(tmp_path / "c.toml", text))


@pytest.mark.parametrize("epsilon", [3.0, math.inf])
def test_the_sections_that_a_run_writes_give_the_same_choices(tmp_path, epsilon):
    choices = Choices(path="d.csv", target="y", labels=("0", "1"), epsilon=epsilon, views=4, seed=5, groups="city")
    recorded = {"data": {"rows": 10, "description": "text"}, "training": {"steps": 3, "noise_multiplier": 1.5}}
    content = {name: {**section, **recorded.get(name, {})} for name, section in choices.sections().items()}
    file = write(tmp_path / "c.toml", toml.text_of({**content, "encoding": {"x": 1}, "versions": {"python": "3"}}))
    assert Choices(**read_choices(file)) == choices


def test_choices_replace_defaults():
    defaults = Settings("mlp", 100, 5, 0.1)
    assert Choices(model="linear", views=3).settings(defaults) == Settings("linear", 100, 5, 0.1, views=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0.0},
        {"epsilon": math.nan},
        {"delta": 1.0},
        {"hold_out": 0.9},
        {"preset": "slow"},
        {"optimizer": "lbfgs"},
        {"device": "tpu"},
        {"data_kind": "audio"},
        {"epochs": -1},
        {"batch_size": 0},
        {"ema": 1.0},
        {"epochs": 1e300},
        {"momentum": -0.1},
        {"weight_decay": math.nan},
        {"seed": 2**64},
        {"counts_share": 1.0},
    ],
)
def test_values_that_are_not_possible_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        Choices(**wrong)
