import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from clipwise import FileLedger, __version__, accounting
from clipwise.cli import app
from clipwise.commands.output import in_words, rounded_up
from clipwise.privacy import Adjacency, Event, Sampling, Unit

EVENT = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.1, 0.01)


def clipwise(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def figure(result, row):
    """The number behind the word `row` in a table."""
    assert result.exit_code == 0, result.output
    return float(re.search(rf"{row}\W+([\d.e+-]+)", result.stdout).group(1))


def refused(result, *words):
    """One clean line on stderr, exit code 2, nothing else."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output and "\x1b" not in result.output
    for word in words:
        assert word in result.stderr


# ------------------------------------------------------------------ epsilon


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--sample-rate", 0.01], {"sample_rate": 0.01}),
        (["--batch-size", 10, "--dataset-size", 1000], {"sample_rate": 0.01}),
        (
            ["--batch-size", 10, "--dataset-size", 1000, "--sampling", "fixed-size"],
            {"sample_rate": 0.01, "sampling": "fixed-size"},
        ),
        (
            [
                "--batch-size",
                10,
                "--dataset-size",
                1000,
                "--sampling",
                "shuffled",
                "--adjacency",
                "replace-one",
            ],
            {"sample_rate": 0.01, "sampling": "shuffled", "adjacency": "replace-one", "period": 100},
        ),
        (["--sampling", "full"], {"sampling": "full"}),
    ],
)
def test_epsilon_agrees_with_the_accountants(options, arguments):
    result = clipwise("epsilon", "--noise-multiplier", 1.1, "--steps", 250, "--delta", 1e-6, *options)
    for accountant in ("pld", "rdp"):
        exact = accounting.epsilon(
            noise_multiplier=1.1, steps=250, delta=1e-6, accountant=accountant, **arguments
        )
        assert exact <= figure(result, accountant.upper()) <= 1.001 * exact
    assert "the one that counts" in next(line for line in result.stdout.splitlines() if "PLD" in line)


def test_epochs_are_so_many_steps():
    common = ["epsilon", "--noise-multiplier", 1.1, "--batch-size", 100, "--dataset-size", 950]
    by_epochs, by_steps = clipwise(*common, "--epochs", 3), clipwise(*common, "--steps", 30)
    assert by_epochs.stdout == by_steps.stdout and "30 steps" in by_steps.stdout


def test_no_noise_is_no_privacy():
    result = clipwise("epsilon", "--noise-multiplier", 0, "--sample-rate", 0.1, "--steps", 1)
    assert result.exit_code == 0 and "infinite" in result.stdout and "nothing is promised" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--noise-multiplier", "--ledger"]),
        (["--noise-multiplier", 1, "--steps", 1], ["--sample-rate"]),
        (["--noise-multiplier", 1, "--sample-rate", 0.1], ["--steps", "--epochs"]),
        (["--noise-multiplier", 1, "--batch-size", 10, "--steps", 1], ["--dataset-size"]),
        (["--noise-multiplier", 1, "--sample-rate", 2, "--steps", 1], ["sample_rate"]),
        (["--noise-multiplier", -1, "--sample-rate", 0.1, "--steps", 1], ["noise_multiplier"]),
        (["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 0], ["steps"]),
        (["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--epochs", 1], ["epochs", "steps"]),
        (["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--delta", 0], ["delta"]),
        (
            ["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--adjacency", "replace-one"],
            ["replace-one", "poisson", "zero-out"],
        ),
        (
            ["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--sampling", "shuffled"],
            ["shuffled", "batch_size"],
        ),
        (["--ledger", "nowhere", "--steps", 1], ["--ledger", "--delta"]),
        (["--ledger", "nowhere"], ["nowhere"]),
    ],
)
def test_epsilon_refuses(options, words):
    refused(clipwise("epsilon", *options), *words)


@pytest.mark.parametrize(
    "arguments",
    [["epsilon", "--noise-multiplier", "much"], ["noise"], ["unknown"], ["epsilon", "--sampling", "x"]],
)
def test_bad_options_end_with_2_and_no_traceback(arguments):
    result = clipwise(*arguments)
    assert result.exit_code == 2 and result.stderr and "Traceback" not in result.output


def test_a_large_delta_is_warned_of():
    common = ["epsilon", "--noise-multiplier", 1, "--batch-size", 10, "--dataset-size", 1000, "--steps", 1]
    assert clipwise(*common).stderr == ""
    result = clipwise(*common, "--delta", 0.01)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ") and "1/N" in result.stderr and result.stderr.count("\n") == 1


# ------------------------------------------------------------------- ledgers


def write_ledger(path, releases, close=True):
    book = FileLedger(path)
    for _ in range(releases):
        book.charge(EVENT)
    content = path.read_bytes()
    book.close()
    if not close:  # as a crash leaves it
        path.write_bytes(content)
    return path


def epsilon_of(steps):
    return accounting.epsilon(noise_multiplier=1.1, sample_rate=0.01, steps=steps, delta=1e-5)


def test_ledger_is_counted_and_not_changed(tmp_path):
    path = write_ledger(tmp_path / "ledger", 100)
    before = path.read_bytes()
    result = clipwise("epsilon", "--ledger", path)
    assert epsilon_of(100) <= figure(result, "PLD") <= 1.001 * epsilon_of(100)
    assert "100 releases" in result.stdout and "cleanly" not in result.stdout
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["ledger"]


def test_ledger_that_is_in_use_is_counted_in_full(tmp_path):
    path = write_ledger(tmp_path / "ledger", 100, close=False)  # blocks of 1, 2, 4, ..., 64
    result = clipwise("epsilon", "--ledger", path)
    assert epsilon_of(127) <= figure(result, "PLD") <= 1.001 * epsilon_of(127)
    assert "did not end cleanly" in result.stdout


def test_torn_ledger_counts_the_most_it_can_stand_for(tmp_path):
    path = write_ledger(tmp_path / "ledger", 100)
    torn = path.read_bytes()[:-9]
    path.write_bytes(torn)
    result = clipwise("epsilon", "--ledger", path)
    assert figure(result, "PLD") > epsilon_of(127)
    assert "torn" in result.stdout and path.read_bytes() == torn


def test_tampered_ledger_is_refused(tmp_path):
    path = write_ledger(tmp_path / "ledger", 100)
    changed = path.read_bytes().replace(b'"count":64', b'"count":16')
    path.write_bytes(changed)
    refused(clipwise("epsilon", "--ledger", path), "checksum")
    assert path.read_bytes() == changed


def test_missing_empty_and_unused_ledgers_are_refused(tmp_path):
    refused(clipwise("epsilon", "--ledger", tmp_path / "none"), "No such file")
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").touch()
    refused(clipwise("epsilon", "--ledger", tmp_path / "empty"), "empty")
    refused(clipwise("epsilon", "--ledger", write_ledger(tmp_path / "new", 0)), "no release")


# --------------------------------------------------------------------- noise


def test_noise_is_enough_and_hardly_more():
    run = {"sample_rate": 0.05, "steps": 200, "delta": 1e-5}
    result = clipwise("noise", "--epsilon", 2, "--batch-size", 50, "--dataset-size", 1000, "--epochs", 10)
    assert result.exit_code == 0 and "200 steps" in result.stdout
    noise, epsilon = map(float, re.search(r"│ ([\d.]+) +│ ([\d.]+) \(PLD\)", result.stdout).groups())
    assert accounting.epsilon(noise_multiplier=noise, **run) <= epsilon <= 2
    assert accounting.epsilon(noise_multiplier=0.998 * noise, **run) > 2


def test_noise_refuses():
    run = ["--sample-rate", 0.1, "--steps", 10]
    refused(clipwise("noise", "--epsilon", -1, *run), "epsilon")
    refused(clipwise("noise", "--epsilon", 1, "--steps", 10), "--sample-rate")


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
    monkeypatch.syspath_prepend(tmp_path)  # and take it off sys.path again at the end
    name = f"models_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODELS))
    return name


def test_check_accepts(target):
    for form in (f"{target}.py:fine", f"{target}:fine"):
        result = clipwise("check", form)
        assert result.exit_code == 0 and result.stdout.startswith("Accepted")


@pytest.mark.parametrize(
    ("function", "reason"),
    [("coupled", "inputs of another"), ("normalized", "BatchNorm1d"), ("averaged", "one loss an example")],
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


def test_a_file_of_the_users_finds_its_neighbours(target, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / f"helper_{target}.py").write_text(
        "from torch import nn\nmodel = nn.Linear(4, 3)\n"
    )
    (tmp_path / "folder" / f"main_{target}.py").write_text(
        f"from helper_{target} import model\nfrom {target} import losses, x, y\n"
        "def made():\n    return model, losses, (x, y)\n"
    )
    assert clipwise("check", f"folder/main_{target}.py:made").exit_code == 0


# ------------------------------------------------------------- help and words


@pytest.mark.parametrize("command", ["demo", "epsilon", "noise", "check"])
def test_help_teaches_by_example(command):
    result = clipwise(command, "--help")
    assert result.exit_code == 0 and f"clipwise {command} " in result.stdout and "--help" in result.stdout


def test_help_lists_the_commands():
    result = clipwise("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in ("demo", "epsilon", "noise", "check", "--version"))


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
