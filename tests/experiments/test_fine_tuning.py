"""The fine-tuning experiment on random features and on a tiny encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.__main__ import main
from experiments.fine_tuning import encoder, table, train
from experiments.harness.store import Store

CPU = torch.device("cpu")
CLASSES = 4


def separable(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % CLASSES
    features = torch.nn.functional.one_hot(labels, 16) + 0.1 * torch.randn(count, 16)
    return torch.nn.functional.normalize(features, dim=-1), labels


def test_the_head_learns_with_and_without_privacy() -> None:
    data, test = separable(4000), separable(400)
    for epsilon in (None, 8.0):
        found = train.train_head(data, test, epsilon, 0, CPU)
        assert found["accuracy"] > 0.9
        assert found.get("epsilon", 0.0) <= 8.0


def test_finished_cells_are_skipped_and_missing_ones_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []

    def train_head(*arguments: Any) -> Any:
        trained.append(arguments[2:4])
        return {"accuracy": 0.5}

    monkeypatch.setattr(table, "features", lambda *_: separable(8))
    monkeypatch.setattr(table, "train_head", train_head)
    command = ["fine-tuning", "--method", "head", "--dataset", "imdb", "--epsilon", "3", "--out", str(tmp_path)]
    for seeds in ("1", "2", "2"):
        assert main([*command, "--seeds", seeds]) == 0
    assert trained == [(None, 0), (3.0, 0), (None, 1), (3.0, 1)]
    assert set(Store(tmp_path).cells) == {f"imdb/head/{b}/{s}" for b in ("none", "3") for s in (0, 1)}
    page = (tmp_path / "results.md").read_text()
    assert "| head only | 50.00 ± 0.00 (2 of 5 seeds) | not run |" in page and "| LoRA | not run |" in page
    assert main([*command, "--minutes", "0", "--seeds", "5"]) == 0
    assert len(trained) == 4


@pytest.mark.integration
def test_the_encoder_is_fine_tuned_with_adapters_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=64,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    monkeypatch.setattr(train, "BATCH", 10)
    monkeypatch.setattr(train, "SETTINGS", dict.fromkeys(("lora", "full"), train.Settings(1, 1e-3)))
    texts, tests = ([(torch.randint(3, 40, (17 + i % 13,)).tolist(), i % 2) for i in range(40)] for _ in range(2))
    for method, epsilon in (("lora", 8.0), ("full", 8.0), ("lora", None)):
        found = train.train_encoder(method, texts, tests, epsilon, 0, CPU, 5, tmp_path)
        assert 0 <= found["accuracy"] <= 1
        assert epsilon is None or 7.5 < found["epsilon"] <= 8.0


def test_padding_keeps_the_mean_of_a_text() -> None:
    batch = encoder.padded([[5, 6], [7, 8, 9]])
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    states = torch.randn(2, 3, 4)
    alone = encoder.pooled(states[:1, :2], batch["attention_mask"][:1, :2])
    torch.testing.assert_close(encoder.pooled(states, batch["attention_mask"])[:1], alone)


def test_the_documentation_has_the_results() -> None:
    root = Path(__file__).parents[2]
    results = (root / "experiments" / "fine_tuning" / "results" / "results.md").read_text()
    rows = [line.removeprefix("| head only ") for line in results.splitlines() if line.startswith("| head only")]
    page = (root / "docs" / "integrations" / "huggingface.md").read_text()
    assert [f"| {name} {row}" in page for name, row in zip(("AG News", "IMDB"), rows, strict=True)] == [True, True]
