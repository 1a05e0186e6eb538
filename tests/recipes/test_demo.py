import io
import json
import math

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from clipwise import accounting
from clipwise.cli import progress
from clipwise.cli.app import app
from clipwise.ledger import ledger
from clipwise.recipes.demo import RUNS, choices
from clipwise.recipes.finish import evaluate, trained_model
from clipwise.recipes.interrupts import Interrupts
from clipwise.recipes.planning import plan_of
from clipwise.recipes.run_folder import RunFolder
from clipwise.recipes.sources import public_test
from clipwise.recipes.train import begin, train

NAMES = [name for name, _ in RUNS]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A quick demo; the tests only read it."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "_SECONDS_BETWEEN_LINES", math.inf)  # also on a slow machine only the last step
        result = CliRunner().invoke(app, ["demo", "--quick", "--seed", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out, result


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_it_prints_a_table_and_where_the_report_is(first):
    out, result = first
    for words in ("test accuracy", "epsilon (PLD)", "time", "tuned on these digits", str(out)):
        assert words in result.stdout
    assert "report.html" in result.stdout.splitlines()[-2]
    assert "(seeded)" in result.stdout  # in the table
    assert "\x1b" not in result.output and "step 1 of" not in result.output  # no live display in a pipe


def test_it_leaves_files_that_load(first):
    out, _ = first
    assert sorted(p.name for p in out.iterdir()) == sorted(NAMES)
    for name in NAMES:
        run = RunFolder(out / name)
        (figure,) = run.released()
        assert figure["rows"] == "public-test" and run.progress()[-1]["step"] == 3
        assert (out / name / "report.html").read_text().startswith("<!doctype html>")
        content = json.loads((out / name / "statement.json").read_text())
        assert content["guarantee"] is None  # seeded, or without privacy


@pytest.mark.parametrize(("name", "budget"), [("epsilon-8", 8), ("epsilon-3", 3)])
def test_a_private_run_writes_its_ledger_and_statement(first, name, budget):
    folder = first[0] / name
    found = ledger.read(folder / "ledger")
    assert found.clean and found.position == 3
    exact = accounting.epsilon_of(found.history, 1e-5)
    assert 0.98 * budget < exact <= budget
    statement = json.loads((folder / "statement.json").read_text())["training"]
    assert statement["spent"]["epsilon"] == pytest.approx(exact) and statement["seeded"]
    # A finished run is not resumed, so no secret is kept.
    assert not (folder / "ledger.resume").exists()


def test_a_second_demo_uses_a_new_folder_and_a_seed_reproduces_it(first):
    out, _ = first
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    result = CliRunner().invoke(app, ["demo", "--quick", "--seed", "1", "--out", str(out)])
    assert result.exit_code == 0 and str(out) + "-2" in result.stdout
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    for name in NAMES:
        old, new = weights(out / name), weights(out.with_name("demo-2") / name)
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_a_bad_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "file" / "inside")])
    assert result.exit_code == 2 and result.stderr.startswith("error: --out") and "Traceback" not in result.output


def test_the_live_display_shows_only_public_figures(tmp_path, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "stdout", lambda: console)
    run = begin(plan_of(choices(8.0, epochs=1)), RunFolder(tmp_path), "")
    with progress.Display(8.0) as display:
        assert train(run, display.watch, Interrupts())
    assert "epoch 1.0 of 1" in screen.getvalue() and "epsilon 8 of 8" in screen.getvalue()
    # The realised batch size is secret: a Moment has no field for it.
    fields = {"step", "steps", "epoch", "epochs", "epsilon", "seconds", "left"}
    assert set(run.folder.progress()[0]) == {*fields - {"epochs", "left"}, "kind", "accountant"}


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "least"), [(8.0, 0.93), (3.0, 0.90)])
def test_the_full_demo_learns(epsilon, least, tmp_path):
    run = begin(plan_of(choices(epsilon, seed=0)), RunFolder(tmp_path), "")
    assert train(run, lambda moment: None, Interrupts())
    (figure,) = evaluate(run.plan, run.encoder, run.folder, public_test(run.plan.choices, run.encoder))
    assert figure.value > least
    assert isinstance(trained_model(run.encoder, run.settings.model, run.folder), torch.nn.Module)
