import io
import json
from dataclasses import fields

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from clipwise import accounting, make_private
from clipwise.cli.app import app
from clipwise.cli.demo import _follow
from clipwise.clipping import PerExample
from clipwise.engine import checkpoint
from clipwise.ledger import ledger
from clipwise.recipes.demo import RECIPES, Moment, accuracy, fresh_folder, run, shortened
from clipwise.recipes.digits import digits
from clipwise.recipes.small_cnn import small_cnn

NAMES = ["without-privacy", "epsilon-8", "epsilon-3"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A quick demo; the tests only read it."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    result = CliRunner().invoke(app, ["demo", "--quick", "--seed", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out, result


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_it_prints_a_table_and_the_statement(first):
    out, result = first
    for words in ("test accuracy", "epsilon (PLD)", "median time", "relative", "Privacy statement", str(out)):
        assert words in result.stdout
    assert "tuned on these digits" in result.stdout
    assert "none is claimed: noise and sampling" in " ".join(result.stdout.split())
    assert "(seeded)" in result.stdout  # in the table
    assert "\x1b" not in result.output and "step 1 of" not in result.output  # no live display in a pipe


def test_it_leaves_files_that_load(first):
    out, _ = first
    assert sorted(p.name for p in out.iterdir()) == sorted(NAMES)
    for name in NAMES:
        model = small_cnn()
        model.load_state_dict(weights(out / name))
        metrics = json.loads((out / name / "metrics.json").read_text())
        assert metrics["test_accuracy"] == accuracy(model)
        assert metrics["median_seconds_per_step"] > 0 and metrics["steps"] == 3


@pytest.mark.parametrize(("name", "budget"), [("epsilon-8", 8), ("epsilon-3", 3)])
def test_a_private_run_writes_its_ledger_and_statement(first, name, budget):
    folder = first[0] / name
    metrics = json.loads((folder / "metrics.json").read_text())
    found = ledger.read(folder / "ledger")
    assert found.clean and found.position == metrics["steps"] == 3
    exact = accounting.epsilon_of(found.history, 1e-5)
    assert metrics["epsilon"] == pytest.approx(exact) and 0.98 * budget < exact <= budget

    statement = json.loads((folder / "statement.json").read_text())
    assert statement["spent"]["epsilon"] == metrics["epsilon"] and statement["seeded"]
    text = (folder / "statement.txt").read_text()
    assert text.startswith("Privacy statement") and "none is claimed" in text
    assert "tuned on these" in text and statement["notes"] == metrics["notes"]

    # A finished run is not resumed, so no secret is kept.
    names = ["checkpoint.pt", "ledger", "metrics.json", "model.safetensors", "statement.json", "statement.txt"]
    assert sorted(p.name for p in folder.iterdir()) == names


def test_a_checkpoint_of_the_demo_can_be_resumed_elsewhere(first):
    saved = checkpoint.load(first[0] / "epsilon-8" / "checkpoint.pt")
    model = small_cnn()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    private = make_private(
        model, optimizer, digits(train=True), clipping=PerExample(0.5), batch_size=512, noise_multiplier=1.0
    )
    with pytest.warns(UserWarning, match="fresh secret"):
        private.load_state_dict(saved["private"])
    assert private.spent(1e-5).epsilon == pytest.approx(
        json.loads((first[0] / "epsilon-8" / "metrics.json").read_text())["epsilon"]
    )


def test_a_second_demo_uses_a_new_folder_and_a_seed_reproduces_it(first):
    out, _ = first
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    result = CliRunner().invoke(app, ["demo", "--quick", "--seed", "1", "--out", str(out)])
    assert result.exit_code == 0 and str(out) + "-2" in result.stdout
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    for name in NAMES:
        old, new = weights(out / name), weights(out.with_name("demo-2") / name)
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_runs_without_a_seed_differ(tmp_path):
    recipe = shortened(RECIPES[1], 1)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    for name in ("a", "b"):
        result = run(recipe, tmp_path / name, seed=None, watch=lambda _: None)
        assert "given seed" not in str(result.statement)
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert not any(torch.equal(a[key], b[key]) for key in a)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)  # unchanged


def test_an_empty_folder_is_used_and_a_bad_one_refused(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "file" / "inside")])
    assert result.exit_code == 2 and result.stderr.startswith("error: --out") and "Traceback" not in result.output
    (tmp_path / "empty").mkdir()
    assert fresh_folder(tmp_path / "empty") == tmp_path / "empty"
    assert fresh_folder(tmp_path / "file") == tmp_path / "file-2"


def test_the_live_display_shows_only_public_figures(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    _follow(shortened(RECIPES[1], 1), tmp_path / "run", None, console)
    for words in ("step 3 of 3", "test accuracy", "epsilon so far (RDP)"):
        assert words in screen.getvalue()
    # The realised batch size is secret: a Moment has no field for it.
    assert [f.name for f in fields(Moment)] == ["step", "steps", "accuracy", "rdp_epsilon"]


@pytest.mark.parametrize(("recipe", "least"), [(RECIPES[1], 0.94), (RECIPES[2], 0.91)])
def test_the_full_demo_learns(recipe, least, tmp_path):
    result = run(recipe, tmp_path / "run", seed=0, watch=lambda _: None)
    assert result.epsilon <= recipe.epsilon and result.accuracy > least
