"""`clipwise train` and what uses its folder: predict, evaluate, export."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from clipwise import accounting
from clipwise.cli import progress
from clipwise.cli.train import INTERRUPTED
from clipwise.ledger.ledger import read
from clipwise.noise.key import NoiseKey
from clipwise.recipes.run_folder import RunFolder
from tests.cli.calls import clipwise, refused

FAST = ["--epochs", 1, "--batch-size", 100, "--device", "cpu"]


def write_table(path: Path, rows: int = 400) -> Path:
    random = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "city", "bought"])
        for _ in range(rows):
            age = int(random.integers(18, 90))
            writer.writerow([age, random.choice(["Oslo", "Bern"]), "yes" if age > 50 else "no"])
    return path


SCHEMA = """
[columns.age]
kind = "number"
bounds = [0, 100]
[columns.city]
kind = "category"
values = ["Oslo", "Bern"]
[target]
name = "bought"
labels = ["no", "yes"]
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    (folder / "schema.toml").write_text(SCHEMA)
    return write_table(folder / "people.csv")


@pytest.fixture(scope="module")
def run(table):
    """A finished run on a declared table; the tests only read it."""
    out = table.parent / "run"
    given = ["--schema", table.with_name("schema.toml"), "--epsilon", 3, "--groups", "city", "--out", out]
    result = clipwise("train", table, *given, *FAST)
    assert result.exit_code == 0, result.output
    return out


def test_a_run_writes_every_file_and_prints_where(run):
    names = ["checkpoint.pt", "config.toml", "evaluation.ledger", "ledger", "metrics.jsonl", "model.safetensors"]
    assert sorted(p.name for p in run.iterdir()) == sorted([*names, "model_card.md", "report.html", "statement.json"])
    statement = json.loads((run / "statement.json").read_text())
    assert statement["guarantee"]["epsilon"] <= 3 and statement["data"]["held_out_rows"] == 40
    groups = {line["group"] for line in statement["accuracy"]}
    assert groups == {None, "Oslo", "Bern", "other values"}
    assert read(run / "evaluation.ledger").position == 1


def test_the_figures_agree(run):
    statement = json.loads((run / "statement.json").read_text())
    spent = accounting.epsilon_of(read(run / "ledger").history, statement["training"]["spent"]["delta"])
    assert statement["training"]["spent"]["epsilon"] == pytest.approx(spent)
    shown = clipwise("epsilon", "--ledger", run / "ledger", "--delta", statement["guarantee"]["delta"])
    assert shown.exit_code == 0 and "3" in shown.stdout


def test_undeclared_columns_and_labels_share_the_budget(table, tmp_path):
    result = clipwise("train", table, "--target", "bought", "--epsilon", 8, "--out", tmp_path / "run", *FAST)
    assert result.exit_code == 0, result.output
    found = read(tmp_path / "run" / "ledger").history
    assert [entry.event.purpose for entry in found] == ["preparation", ""]
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert 7.5 < accounting.epsilon_of(found, statement["guarantee"]["delta"]) <= 8


def test_its_config_gives_the_same_run_again(run, tmp_path):
    result = clipwise("train", "--config", run / "config.toml", "--dry-run", "--json", "--epsilon", 2)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["kind"] == "dry-run" and plan["epsilon"] <= 2 and plan["batch_size"] == 100 and plan["parameters"] > 0


def test_a_dry_run_writes_nothing(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = clipwise("train", table, "--target", "bought", "--epsilon", 3, "--dry-run")
    assert result.exit_code == 0 and "noised counts" in result.stdout and not any(tmp_path.iterdir())


def test_json_lines(table, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", math.inf)  # also on a slow machine only the last step
    schema = ["--schema", table.with_name("schema.toml")]
    result = clipwise("train", table, *schema, "--epsilon", 3, "--out", tmp_path / "run", "--json", *FAST)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["plan", "task", "progress", "released", "done"]
    assert lines[1]["labels"] == ["no", "yes"]


def test_without_privacy_and_as_a_public_reference(run, table, tmp_path):
    schema = ["--schema", table.with_name("schema.toml")]
    plain = clipwise("train", table, *schema, "--epsilon", "none", "--out", tmp_path / "plain", *FAST)
    assert plain.exit_code == 0, plain.output
    assert json.loads((tmp_path / "plain" / "statement.json").read_text())["guarantee"] is None
    reference = ["--public-reference", tmp_path / "plain"]
    result = clipwise("train", table, *schema, "--epsilon", 3, "--out", tmp_path / "run", *reference, *FAST)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "statement.json").read_text())["public_reference"]["run"] == "plain"
    assert json.loads((run / "statement.json").read_text())["public_reference"] is None
    refused(clipwise("train", table, *schema, "--epsilon", 3, "--public-reference", run), "--epsilon none")


def test_predictions(run, table, tmp_path):
    (tmp_path / "new.csv").write_text("age,city\n20,Oslo\n80,Elsewhere\n")
    shown = clipwise("predict", run, tmp_path / "new.csv")
    lines = list(csv.reader(shown.stdout.splitlines()))
    assert lines[0] == ["prediction", "probability of no", "probability of yes"] and len(lines) == 3
    assert lines[1][0] in ("no", "yes") and float(lines[1][1]) + float(lines[1][2]) == pytest.approx(1, abs=1e-4)
    written = clipwise("predict", run, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert written.exit_code == 0 and (tmp_path / "p.csv").read_text() == shown.stdout


def test_evaluations(run, table, tmp_path):
    exact = clipwise("evaluate", run, table, "--public", "--json")
    assert exact.exit_code == 0 and json.loads(exact.stdout)["rows"] == "public-test"
    noised = clipwise("evaluate", run, table, "--epsilon", 1, "--ledger", tmp_path / "new.ledger")
    assert "It cost epsilon 1 at delta 1e-05 (zero-out of one record), charged to " in noised.stdout
    assert noised.exit_code == 0 and read(tmp_path / "new.ledger").position == 1
    assert "on private rows" in noised.stdout
    refused(clipwise("evaluate", run, table), "--public")
    refused(clipwise("evaluate", run, table, "--epsilon", 1, "--ledger", tmp_path / "new.ledger"), "exists")


def test_a_torchscript_export_gives_the_same_outputs(run, tmp_path):
    import torch

    from clipwise.recipes.finish import trained_model
    from clipwise.recipes.predict import open_run

    file = tmp_path / "model.pt"
    assert clipwise("export", run, "--format", "torchscript", "--out", file).exit_code == 0
    folder, encoder, name = open_run(run)
    (x,) = encoder.synthetic(7).tensors[:1]
    assert torch.equal(torch.jit.load(file)(x), trained_model(encoder, name, folder)(x))
    refused(clipwise("export", run, "--format", "pickle"), "pickle")


@pytest.mark.integration
def test_an_onnx_export_gives_the_same_outputs(run, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    from clipwise.recipes.finish import trained_model
    from clipwise.recipes.predict import open_run

    file = tmp_path / "model.onnx"
    assert clipwise("export", run, "--format", "onnx", "--out", file).exit_code == 0
    folder, encoder, name = open_run(run)
    (x,) = encoder.synthetic(7).tensors[:1]
    (found,) = runtime.InferenceSession(file).run(None, {"input": x.numpy()})
    assert np.allclose(found, trained_model(encoder, name, folder)(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "DATA is needed"),
        (["nothing.csv", "--target", "y", "--epsilon", 3], "nothing.csv"),
        (["TABLE", "--target", "bought"], "--epsilon"),
        (["TABLE", "--target", "bought", "--epsilon", "three"], "three"),
        (["TABLE", "--epsilon", 3], "--target"),
        (["TABLE", "--target", "price", "--epsilon", 3], "price"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--model", "forest"], "forest"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--groups", "city"], "category"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--image-size", 5000], "--image-size"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--public-test", "OTHER"], "city"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--public-test", "TABLE"], "whose rows are private"),
        (["--resume", "nowhere", "--dry-run"], "dry-run"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--public-test", "none.csv"], "none.csv"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--name", "a", "--out", "b"], "--name"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--public-test", "digits"], "--public-test digits"),
        (["TABLE", "--epsilon", 3, "--kind", "digits"], "--kind digits"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--grey"], "--grey"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--augmentation", 4], "--augmentation"),
        (["TABLE", "--target", "bought", "--epsilon", 3, "--seed", 2**64], "--seed"),
        (["digits", "--target", "bought", "--epsilon", 3], "--target"),
        (["--resume", "nowhere"], "nowhere"),
        (["--resume", "nowhere", "--epochs", 3], "epochs"),
    ],
)
def test_wrong_arguments_are_one_line(table, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    paths = {"TABLE": table, "OTHER": table.with_name("other.csv")}
    paths["OTHER"].write_text("age,town,bought\n20,Oslo,no\n")
    refused(clipwise("train", *[paths.get(a, a) for a in arguments]), words)
    assert not any(tmp_path.iterdir())  # nothing was begun


def test_a_run_that_cannot_find_its_labels_names_the_cost(table, tmp_path, monkeypatch):
    monkeypatch.setattr(NoiseKey, "fresh", lambda: NoiseKey.from_seed(0))
    few = tmp_path / "few.csv"
    few.write_text("age,bought\n" + "".join(f"{row},label {row}\n" for row in range(200)))
    out = tmp_path / "run"
    refused(clipwise("train", few, "--target", "bought", "--epsilon", 3, "--out", out, *FAST[:2]), str(out / "ledger"))
    assert read(out / "ledger").position == 1


def test_a_dry_run_estimates_time_and_memory_of_what_is_not_declared(table, tmp_path):
    texts = tmp_path / "texts.csv"
    texts.write_text("words,label\n" + "a few words,no\n" * 200)
    for arguments in ([table, "--target", "bought"], [texts, "--text", "words", "--target", "label"]):
        result = clipwise("train", *arguments, "--epsilon", 3, "--dry-run", "--device", "cpu", "--json")
        found = json.loads(result.stdout)
        assert min(found["parameters"], found["seconds"], found["megabytes"]) > 0
        shown = clipwise("train", *arguments, "--epsilon", 3, "--dry-run", "--device", "cpu").stdout
        assert "parameters at most" in shown and "memory" in shown


def test_too_few_rows_for_noised_labels_cost_nothing(tmp_path):
    few = tmp_path / "few.csv"
    few.write_text("age,bought\n20,no\n70,yes\n")
    result = clipwise("train", few, "--target", "bought", "--epsilon", 3, "--out", tmp_path / "run", *FAST[:2])
    refused(result, "With 2 training rows and this budget", "--labels")
    assert not (tmp_path / "run").exists()


def test_labels_that_are_not_in_the_data_are_suspected(table, tmp_path):
    arguments = ["--target", "bought", "--labels", "No,Yes", "--epsilon", 8, "--out", tmp_path / "run"]
    result = clipwise("train", table, *arguments, *FAST)
    assert result.exit_code == 0 and "spelled" in result.stderr
    assert "predicts one of 2 labels: No, Yes" in result.stdout


def test_the_encoding_of_a_run_is_that_of_all_its_files(tmp_path):
    rows = write_table(tmp_path / "rows.csv").read_text().replace("Oslo", "Münster")
    (tmp_path / "rows.csv").write_text(rows, encoding="latin-1")
    (tmp_path / "utf-8.csv").write_text(rows)
    out, data = tmp_path / "run", tmp_path / "rows.csv"
    arguments = ["--target", "bought", "--encoding", "latin-1", "--epsilon", 8, "--out", out]
    public = shutil.copy(data, tmp_path / "public.csv")
    result = clipwise("train", data, *arguments, "--public-test", public, *FAST)
    assert result.exit_code == 0 and "on public test rows" in result.stdout, result.output
    assert clipwise("predict", out, data).exit_code == 0
    one = clipwise("evaluate", out, data, "--public")
    other = clipwise("evaluate", out, tmp_path / "utf-8.csv", "--encoding", "utf-8", "--public")
    assert other.exit_code == 0 and other.stdout == one.stdout


def test_a_full_disk_is_named_in_one_line(table, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "write_config", full)
    schema = ["--schema", table.with_name("schema.toml")]
    refused(clipwise("train", table, *schema, "--epsilon", 3, "--out", tmp_path / "run", *FAST), "No space left")


def test_an_export_that_cannot_be_written(run, tmp_path):
    file = tmp_path / "missing" / "model.pt"
    refused(clipwise("export", run, "--format", "torchscript", "--out", file), "cannot be written")


def test_a_damaged_held_out_image_ends_the_run_before_the_training(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for place in range(10):
        folder = tmp_path / "images" / "ab"[place // 5]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8)).save(folder / f"{place}.png")
    (folder / "9.png").write_bytes(b"no image")
    refused(clipwise("train", tmp_path / "images", "--epsilon", 3, "--out", tmp_path / "run", *FAST[:2]), "9.png")
    assert not (tmp_path / "run").exists()


def test_the_size_and_the_colours_of_images_are_flags(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((20, 6, 6, 3), np.uint8), labels=np.arange(20) % 2)
    given = ["--labels", "0,1", "--epsilon", 3, "--image-size", 16, "--grey", "--dry-run", "--json"]
    small, large = (
        json.loads(clipwise("train", tmp_path / "a.npz", *given, "--model", "tanh-cnn", *more).stdout)
        for more in ([], ["--image-size", 32])
    )
    assert small["parameters"] < large["parameters"]


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("ledger", None, None, "has no ledger"),
        ("config.toml", "epsilon = 3.0", "epsilon = 8.0", "noise_multiplier"),
        ("config.toml", "hold_out = 0.1", "hold_out = 0.2", "has changed"),
    ],
)
def test_a_run_whose_files_do_not_belong_together_is_not_continued(run, tmp_path, file, old, new, words):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    if old is None:
        (copy / file).unlink()
    else:
        text = (copy / file).read_text()
        assert old in text
        (copy / file).write_text(text.replace(old, new))
    refused(clipwise("train", "--resume", copy), words)


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_and_the_run_continues(table, tmp_path):
    out = tmp_path / "run"
    given = ["--schema", table.with_name("schema.toml"), "--epsilon", "3", "--epochs", "4000", "--batch-size", "100"]
    program = [sys.executable, "-c", "from clipwise.cli.app import app; app()"]
    process = subprocess.Popen(
        [*program, "train", str(table), *map(str, given), "--out", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    deadline, ledger = time.monotonic() + 300, out / "ledger"
    # Between its creation and its first line the file is empty.
    while not ledger.exists() or not ledger.stat().st_size or read(ledger).position < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED and f"--resume {out}" in errors and "Traceback" not in errors
    found = read(out / "ledger")
    assert found.clean and found.exact and (out / "checkpoint.pt").is_file()
