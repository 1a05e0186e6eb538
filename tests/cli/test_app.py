import math
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise import __version__
from clipwise.accounting.tradeoff import Tradeoff
from clipwise.cli.output import in_words, rounded_up
from clipwise.privacy import Adjacency
from tests.cli.calls import clipwise, refused


@pytest.mark.parametrize(
    "arguments", [["epsilon", "--noise-multiplier", "much"], ["noise"], ["unknown"], ["epsilon", "--sampling", "x"]]
)
def test_bad_options_end_with_2_and_no_traceback(arguments):
    result = clipwise(*arguments)
    assert result.exit_code == 2 and result.stderr and "Traceback" not in result.output


# --------------------------------------------------------------------- check

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F

x, y = torch.rand(6, 4), torch.arange(6) % 3

def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")

def fine():
    return nn.Linear(4, 3), losses, (x, y)

def clipped():
    from clipwise import layers
    return layers.clip_inputs(nn.Sequential(nn.Linear(4, 3)), input_norm=1.0), losses, (x, y)

def mapping():
    return nn.Linear(4, 3), lambda model, batch: losses(model, batch["x"], batch["y"]), {"x": x, "y": y}

def coupled():
    return nn.Linear(4, 3), lambda model, x, y: losses(model, x - x.mean(0), y), (x, y)

def normalized():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), losses, (x, y)

def averaged():
    return nn.Linear(4, 3), lambda model, x, y: losses(model, x, y).mean(), (x, y)

def mistaken():
    return nn.Linear(5, 3), losses, (x, y)

def short():
    return nn.Linear(4, 3), losses

def tensor():
    return nn.Linear(4, 3), losses, x

constant = 3
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # removed from sys.path at the end
    name = f"models_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODELS))
    return name


def test_check_accepts(target):
    for form in (f"{target}.py:fine", f"{target}:fine", f"{target}.py:clipped", f"{target}.py:mapping"):
        result = clipwise("check", form)
        assert result.exit_code == 0 and result.stdout.startswith("Accepted")


@pytest.mark.parametrize(
    ("function", "reason"),
    [("coupled", "inputs of another"), ("normalized", "BatchNorm1d"), ("averaged", "one loss per example")],
)
def test_check_refuses(target, function, reason):
    result = clipwise("check", f"{target}.py:{function}")
    assert result.exit_code == 1
    assert result.stdout.startswith("Refused") and reason in result.stdout


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("fine", ["package.module:function"]),
        ("nowhere.py:fine", ["no file nowhere.py"]),
        ("no_such_module_here:fine", ["ModuleNotFoundError"]),
        ("{}.py:absent", ["absent"]),
        ("{}.py:constant", ["constant"]),
        ("{}.py:short", ["(model, loss, batch)"]),
        ("{}.py:tensor", ["(model, loss, batch)"]),
        ("{}.py:mistaken", ["RuntimeError", "line 9"]),
    ],
)
def test_check_explains_what_it_cannot_run(target, form, words):
    refused(clipwise("check", form.format(target)), *words)


def test_a_user_file_can_import_its_neighbours(target, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / f"helper_{target}.py").write_text("from torch import nn\nmodel = nn.Linear(4, 3)\n")
    (tmp_path / "folder" / f"main_{target}.py").write_text(
        f"from helper_{target} import model\nfrom {target} import losses, x, y\n"
        "def made():\n    return model, losses, (x, y)\n"
    )
    assert clipwise("check", f"folder/main_{target}.py:made").exit_code == 0


# ------------------------------------------------------------- help and output


@pytest.mark.parametrize("command", ["demo", "epsilon", "noise", "tradeoff", "statement", "check"])
def test_help_teaches_by_example(command):
    result = clipwise(command, "--help")
    assert result.exit_code == 0 and f"clipwise {command} " in result.stdout and "--help" in result.stdout


def test_help_lists_the_commands():
    result = clipwise("--help")
    assert result.exit_code == 0
    for command in ("demo", "epsilon", "noise", "tradeoff", "statement", "check", "--version"):
        assert command in result.stdout


def test_version():
    assert clipwise("--version").stdout == f"clipwise {__version__}\n"


def test_a_pipe_gets_no_ansi():
    assert "\x1b" not in clipwise("noise", "--epsilon", 3, "--sample-rate", 0.1, "--steps", 10).output


@given(st.floats(1e-9, 1e9), st.integers(2, 6))
def test_bounds_are_rounded_up(value, digits):
    shown = float(rounded_up(value, digits))
    assert value <= shown <= value * (1 + 1.01 * 10 ** (1 - digits))


def test_words_follow_the_definition():
    words = in_words(1.6, 1e-6, Adjacency.ZERO_OUT)
    assert "empty one" in words and "e^epsilon = 4.96, plus 1e-06" in words
    assert "at most 4.96 of 100" in words  # e^1.6 * 0.01 + 1e-6, rounded up
    assert "at most 99.8 of 100" in in_words(6.0, 1e-6, Adjacency.ZERO_OUT)  # 1 - e^-6 (1 - 0.01 - 1e-6)
    assert "any other" in in_words(1.0, 1e-6, Adjacency.REPLACE_ONE)
    assert "record is added or removed" in in_words(1.6, 1e-6, Adjacency.ADD_REMOVE)


def test_words_take_the_better_of_epsilon_and_the_curve():
    blind, open_book = Tradeoff.identity(), Tradeoff.nothing()
    assert "at most 1.01 of 100" in in_words(1.6, 1e-6, Adjacency.ZERO_OUT, curve=blind)
    assert "at most 4.96 of 100" in in_words(1.6, 1e-6, Adjacency.ZERO_OUT, curve=open_book)


@given(st.floats(1e-6, 1e6))
def test_words_never_understate(epsilon):
    words = in_words(epsilon, 1e-6, Adjacency.ZERO_OUT)
    if "e^epsilon = " in words:
        assert float(words.split("e^epsilon = ")[1].split(",")[0]) >= math.exp(epsilon)
    else:
        assert epsilon >= 700
