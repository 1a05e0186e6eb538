"""The IMDB experiment on a handful of made-up reviews: it runs, and says what it did."""

import csv
import io
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import clipwise
from experiments.__main__ import main
from experiments.fast_clipping import imdb, texts
from experiments.fast_clipping.texts import BUCKETS, PADDING, encode, read

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LENGTH = 12
REVIEWS = [(0, "Dull, dull\nand <br />slow"), (1, "A joy: warm, funny"), (1, ""), (0, "bad " * 300)]


def write(folder, split, count):
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["label", "id", "rating", "text"])
    for i in range(count):
        label, review = REVIEWS[i % len(REVIEWS)]
        rows.writerow([label, i, 9 * label + 1, review])
    (folder / f"imdb_{split}.csv.xz").write_bytes(lzma.compress(text.getvalue().encode()))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "train", 32)
    write(tmp_path, "test", 8)
    return tmp_path


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short texts, on one core."""
    for module in (imdb, texts):
        monkeypatch.setattr(module, "LENGTH", LENGTH)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_words_go_to_public_buckets():
    long, short = encode("bad " * 300), encode("Dull, dull<br />slow")
    assert len(long) == len(short) == LENGTH and PADDING not in long
    assert short[0] == short[1] != short[2] and set(short[3:]) == {PADDING}
    assert all(0 < i < BUCKETS for i in long + short[:3])


def test_files_are_read_as_they_are_written(folder):
    ids, labels = read(folder, "train", CPU).tensors
    assert ids.shape == (32, LENGTH) and labels.tolist() == [label for label, _ in REVIEWS] * 8
    assert ids[0].tolist() == encode(REVIEWS[0][1]) and not ids[2].any()


def test_padding_is_not_in_the_mean():
    model, _ = imdb.build(0, CPU)
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model.block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(torch.tensor([encode("a joy"), encode("")]))
    states, mean = seen
    torch.testing.assert_close(mean[0], states[0, :2].mean(0))
    assert not mean[1].any()


def test_a_coupled_model_is_refused(monkeypatch):
    imdb.require_accepted(CPU)
    own = imdb.loss
    monkeypatch.setattr(imdb, "loss", lambda model, ids, y: own(model, ids, y) / (ids != PADDING).sum())
    with pytest.raises(clipwise.ConfigurationError, match="number that is computed from the whole batch"):
        imdb.require_accepted(CPU)


def test_accuracy_counts_hits():
    test = TensorDataset(torch.arange(4)[:, None], torch.tensor([0, 1, 1, 1]))
    assert imdb.accuracy(lambda ids: torch.nn.functional.one_hot(ids[:, 0] % 2, 2), test) == 0.75


def test_it_runs(folder, monkeypatch):
    asked = []
    original = clipwise.make_private
    monkeypatch.setattr(clipwise, "make_private", lambda *a, **k: asked.append(k) or original(*a, **k))
    out = folder / "results"
    budgets = ["--epsilon", "3", "--epsilon", "8", "--seeds", "2"]
    imdb.main(["--data", str(folder), *budgets, "--epochs", "1", "--batch-size", "16", "--out", str(out)])
    results = json.loads((out / "results.json").read_text())
    runs = results["runs"]
    assert [(r["budget"], r["seed"]) for r in runs] == [(b, s) for b in (None, 3.0, 8.0) for s in (0, 1)]
    assert results["environment"]["versions"]["torch"] and results["commoner_class"] == 0.5
    for run in runs:
        assert run["accuracy"] * 8 in range(9)
        if run["budget"] is None:
            assert run["spent"] is None
        else:
            assert 0.9 * run["budget"] < run["spent"]["epsilon"] <= run["budget"]
            assert run["spent"]["steps"] == 2 and "poisson" in run["spent"]["in_words"]
    # A published seed may not make the noise.
    assert len(asked) == 4 and all(k.get("seed") is None for k in asked)
    assert str(folder) not in (out / "results.json").read_text()
    lines = (out / "results.md").read_text().splitlines()
    assert [line.split("|")[1].split(",")[0].strip() for line in lines[-3:]] == ["none", "epsilon 3", "epsilon 8"]


def test_a_missing_file_is_named(tmp_path, capsys):
    assert main(["fast-clipping", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "imdb_train.csv.xz" in capsys.readouterr().err


def test_another_process_without_further_packages_finds_the_same_buckets():
    script = """if True:
        import sys
        absent = ("dp_accounting", "typer", "rich", "safetensors", "matplotlib", "opacus")
        sys.modules.update(dict.fromkeys(absent))
        from experiments.fast_clipping import imdb, texts
        print(texts.encode("dull")[0])
    """
    command = [sys.executable, "-c", script]
    other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(other.stdout) == encode("Dull!")[0]


def test_the_module_is_short():
    assert len(Path(imdb.__file__).read_text().splitlines()) < 150
