"""`PrivateTrainer`: equal to the plain clipwise loop, with the features of `Trainer`."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import clipwise

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import (
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from clipwise.integrations.huggingface import PrivacyArguments, PrivateTrainer
from tests.integrations import huggingface_models as tiny
from tests.integrations import huggingface_ranks

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
SIZE, PIECE, PIECES = 24, 3, 2  # 4 steps per epoch
RATE = 0.05
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])  # of the classes
SEEDED = PrivacyArguments(noise_multiplier=1.0, seed=3)


class StopAfter(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps, self.ends = steps, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends += 1
        control.should_training_stop |= state.global_step >= self.steps


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": PIECE,
        "gradient_accumulation_steps": PIECES,
        "learning_rate": RATE,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "logging_steps": 2,
    }
    return TrainingArguments(str(folder), report_to=[], disable_tqdm=True, use_cpu=True, **{**fixed, **options})


def trainer(
    folder: Path, privacy: PrivacyArguments = SEEDED, head: str = "sequence", kind: Any = PrivateTrainer, **options: Any
) -> Any:
    own = {
        name: options.pop(name)
        for name in ("callbacks", "model", "train_dataset", "eval_dataset", "data_collator", "processing_class")
        if name in options
    }
    given: dict[str, Any] = {
        "model": own.pop("model") if "model" in own else tiny.model(head),
        "train_dataset": tiny.records(SIZE, head),
        "data_collator": tiny.collate,
    }
    return kind(args=arguments(folder, **options), privacy=privacy, **{**given, **own})


class Weighted(PrivateTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **unused: Any) -> Any:
        return F.cross_entropy(model(**inputs).logits, inputs["labels"], weight=WEIGHTS)


def plain_loop(head: str, **options: Any) -> list[Tensor]:
    model, rows = tiny.model(head).train(), tiny.records(SIZE, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 8)
    private = clipwise.make_private(
        model, optimizer, rows, batch_size=PIECE * PIECES, noise_multiplier=1.0, seed=3,
        max_physical_batch_size=PIECE, collate_fn=tiny.collate,
    )  # fmt: skip
    for _ in range(2):
        for step in private.loader:
            for batch in step:
                losses = None
                if len(next(iter(batch.values()))):
                    with private.randomness():
                        losses = losses_of(model(**batch), batch, head, **options)
                private.step(losses)
            scheduler.step()
    return list(model.parameters())


def losses_of(outputs: Any, batch: dict[str, Tensor], head: str, **options: Any) -> Tensor:
    """The loss of each record: the mean over its own labels."""
    if head == "question":
        starts, ends = (
            F.cross_entropy(logits.masked_fill(batch["attention_mask"] == 0, -1e30), positions, reduction="none")
            for logits, positions in (
                (outputs.start_logits, batch["start_positions"]),
                (outputs.end_logits, batch["end_positions"]),
            )
        )
        return (starts + ends) / 2
    logits, labels = outputs.logits, batch["labels"]
    if head == "regression":
        return F.mse_loss(logits.squeeze(1), labels, reduction="none")
    if head == "multi-label":
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
    if head in ("causal", "llama"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", **options)
    return losses if losses.dim() == 1 else losses.sum(1) / (labels != -100).sum(1)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # head, options of the trainer, of the loss
    **{head: (head, {}, {}) for head in tiny.HEADS},
    "smoothed sequence": ("sequence", {"label_smoothing_factor": 0.2}, {"label_smoothing": 0.2}),
    "smoothed causal": ("causal", {"label_smoothing_factor": 0.2}, {"label_smoothing": 0.2}),
    "weighted": ("sequence", {"kind": Weighted}, {"weight": WEIGHTS}),
}


@pytest.mark.parametrize("case", CASES)
def test_train_equals_the_plain_loop(tmp_path: Path, case: str) -> None:
    head, given, options = CASES[case]
    made = trainer(tmp_path, head=head, **given)
    made.train()
    assert made.state.global_step == made.private.steps == 8
    for mine, its in zip(made.model.parameters(), plain_loop(head, **options), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    made.private.statement()


def test_epsilon_is_logged_and_no_training_loss(tmp_path: Path) -> None:
    stop = StopAfter(99)
    made = trainer(
        tmp_path, PrivacyArguments(epsilon=3.0, delta=1e-3), callbacks=[stop], eval_strategy="epoch",
        eval_dataset=tiny.records(5, "sequence", seed=1),
    )  # fmt: skip
    result = made.train()
    history = made.state.log_history
    assert not any({"loss", "train_loss", "grad_norm", "total_flos"} & entry.keys() for entry in history)
    spent = [entry["epsilon"] for entry in history if "learning_rate" in entry]
    assert spent == sorted(spent) and 2.5 < spent[-1] <= 3.0 and len(spent) == 4
    assert [entry["epoch"] for entry in history if "eval_loss" in entry] == [1.0, 2.0]
    assert result.training_loss != result.training_loss and "train_loss" not in result.metrics  # nan
    assert stop.ends == 8
    assert made.state.total_flos == 0
    assert "Private(" in repr(made.private) and "<table>" in made.private._repr_html_()


@pytest.mark.parametrize("at", [3, 4], ids=["within an epoch", "between epochs"])
def test_a_checkpoint_continues_the_run(tmp_path: Path, at: int) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": at}
    privacy = PrivacyArguments(noise_multiplier=1.0, seed=3, ledger=str(tmp_path / "ledger"))
    trainer(tmp_path, privacy, callbacks=[StopAfter(at)], **options).train()
    assert not list(tmp_path.glob("checkpoint-*/rng_state*"))
    resumed = trainer(tmp_path, privacy, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", clipwise.PrivacyWarning)  # such as one about a fresh secret
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == resumed.private.steps == 8
    assert resumed.state.epoch == 2.0
    for mine, its in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)
    resumed.private.statement()


def test_a_resumed_run_ends_where_repeated_steps_used_up_the_budget(tmp_path: Path) -> None:
    privacy = PrivacyArguments(epsilon=3.0, delta=1e-3, ledger=str(tmp_path / "ledger"))
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, privacy, callbacks=[StopAfter(5)], **options).train()
    resumed = trainer(tmp_path, privacy, **options)
    with pytest.warns(clipwise.PrivacyWarning, match="Training ends here"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step < resumed.private.steps == 8
    assert resumed.private.spent().epsilon <= 3.0
    resumed.save_model(str(tmp_path / "saved"))


def test_a_checkpoint_without_the_run_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    (tmp_path / "checkpoint-4" / "clipwise.pt").unlink()
    with pytest.raises(clipwise.CheckpointError, match="would not be counted"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_second_call_of_train_is_counted_too(tmp_path: Path) -> None:
    made = trainer(tmp_path, PrivacyArguments(noise_multiplier=1.0), num_train_epochs=1)
    made.train()
    first = made.private.spent()
    made.train()
    assert made.private.spent().steps == 2 * first.steps == 8
    assert made.private.spent().epsilon > first.epsilon


def test_a_compiled_model_trains_as_it_is(tmp_path: Path) -> None:
    made = trainer(tmp_path, model=torch.compile(tiny.model("sequence"), backend="eager"), max_steps=2)
    made.train()
    assert made.private.steps == 2


def test_generation_in_the_evaluation(tmp_path: Path) -> None:
    class PrivateSeq2SeqTrainer(PrivateTrainer, Seq2SeqTrainer):
        pass

    lengths: list[int] = []

    def metrics(found: Any) -> dict[str, float]:
        lengths.append(found.predictions.shape[1])
        return {}

    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, max_steps=2, save_strategy="no",
        predict_with_generate=True, generation_max_length=5,
    )  # fmt: skip
    made = PrivateSeq2SeqTrainer(
        tiny.model("seq2seq"), arguments, data_collator=tiny.collate, train_dataset=tiny.records(8, "seq2seq"),
        eval_dataset=tiny.records(4, "seq2seq", seed=1), compute_metrics=metrics,
        privacy=PrivacyArguments(noise_multiplier=1.0),
    )  # fmt: skip
    made.train()
    assert made.private.steps == 2
    made.evaluate(num_beams=2)
    assert lengths


def test_max_steps_bf16_and_checkpointed_layers(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, PrivacyArguments(epsilon=3.0, delta=1e-3), head="causal", max_steps=3, bf16=True,
        gradient_checkpointing=True,
    )  # fmt: skip
    made.train()
    assert made.state.global_step == 3
    assert 2.5 < made.private.spent().epsilon <= 3.0
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())


def test_the_best_model_is_declared(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        eval_dataset=tiny.records(5, "sequence", seed=1),
    )  # fmt: skip
    made.train()
    assert "earlier checkpoint" in str(made.private.statement())


def test_random_collators_draw_from_secret_randomness(tmp_path: Path) -> None:
    draws: list[float] = []

    def collate(rows: Any) -> Any:
        draws.append(float(torch.rand(())))
        return tiny.collate(rows)

    first = []
    for _ in range(2):  # `TrainingArguments.seed` is 42 in both
        draws.clear()
        trainer(tmp_path, PrivacyArguments(noise_multiplier=1.0), data_collator=collate, max_steps=1).train()
        first.append(draws[0])
    assert first[0] != first[1]


def test_columns_that_the_model_does_not_take_are_removed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = ("input_ids", "attention_mask")
    rows = [row | {name: row[name].tolist() for name in names} for row in tiny.records(SIZE, "sequence")]
    table = datasets.Dataset.from_list([row | {"text": "unused"} for row in rows]).with_format("torch")

    def collate(given: Any) -> Any:
        assert all(set(row) == {"input_ids", "attention_mask", "labels"} for row in given)
        return tiny.collate(given)

    made = trainer(tmp_path, train_dataset=table, data_collator=collate, max_steps=2)
    made.train()
    assert made.private.steps == 2


def test_the_command_line_gives_the_privacy_arguments() -> None:
    (found,) = HfArgumentParser(PrivacyArguments).parse_args_into_dataclasses(["--epsilon", "3", "--delta", "1e-5"])
    assert (found.epsilon, found.delta, found.max_norm) == (3.0, 1e-5, 1.0)


class Coupled(PrivateTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **unused: Any) -> Any:
        labels = inputs.pop("labels")
        losses = torch.nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return (losses / (1 + labels.float().mean())).mean()


class Unknown(PrivateTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **unused: Any) -> Any:
        return super().compute_loss(model, inputs) ** 2


def test_a_loss_that_mixes_records_is_refused(tmp_path: Path) -> None:
    privacy = PrivacyArguments(noise_multiplier=1.0)
    for kind, error in ((Coupled, clipwise.CoupledExamplesError), (Unknown, clipwise.StepError)):
        made = trainer(tmp_path, privacy, kind=kind)
        with pytest.raises(error):
            made.train()


def test_two_processes_train_the_model_of_one(tmp_path: Path) -> None:
    # As `accelerate launch` does on GPUs; on CPUs it starts several processes only with MPI.
    launch = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
        "tests.integrations.huggingface_ranks", str(tmp_path / "two"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "src:."}
    (tmp_path / "two").mkdir()
    found = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr[-4000:]
    two = torch.load(tmp_path / "two" / "found.pt", weights_only=True)
    one = huggingface_ranks.train(tmp_path / "one", gradient_accumulation_steps=2)
    assert two["steps"] == one.private.steps == 4
    for name, weight in one.model.state_dict().items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-3, atol=1e-4)
    assert "epsilon" in two["logged"][0]
    assert (tmp_path / "two" / "checkpoint-4" / "clipwise.pt").exists()
