"""A run with `loss=` runs the replacement test on its first batches, before any release."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import clipwise
from clipwise.errors import ConfigurationError, CoupledExamplesError
from clipwise.report.statement import Statement
from clipwise.sampling.augmentation import Crop, Flip, Views
from clipwise.sampling.batch_structure import arguments_of
from clipwise.validation import first_batches
from tests.runs import data, network, private_run
from tests.runs import losses_of as losses_of_batch
from tests.validation.cases import APART, COUPLED, WORDS, Case, losses_of, perceptron

SIZE = 24


def run_of(model: nn.Module, dataset: Any, loss: Any, **options: Any) -> clipwise.Private:
    defaults: dict[str, Any] = {"sampling": "full", "noise_multiplier": 1.0}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return clipwise.make_private(model, optimizer, dataset, loss=loss, **{**defaults, **options})


def train(private: clipwise.Private, loss: Callable[..., Tensor], steps: int = 3) -> None:
    while private.steps < steps:
        for batch in private.loader:
            private.step(loss(*arguments_of(batch)))
            if private.steps == steps:
                return


def dataset_of(case: Case) -> TensorDataset:
    parts = [case.draw() for _ in range(SIZE // 8)]
    return TensorDataset(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def refused(private: clipwise.Private, loss: Callable[..., Tensor]) -> str:
    """Return the error message. Nothing was counted before it."""
    with pytest.raises(CoupledExamplesError) as caught:
        train(private, loss)
    assert private.steps == 0
    return str(caught.value)


# -- losses


@pytest.mark.parametrize("name", COUPLED)
def test_a_coupled_loss_is_refused_before_the_first_release(name: str) -> None:
    torch.manual_seed(0)
    case = COUPLED[name]
    model = case.build()
    loss = partial(case.loss, model)
    refused(run_of(model, dataset_of(case), loss), loss)


@pytest.mark.parametrize("name", APART)
def test_an_uncoupled_loss_trains(name: str) -> None:
    torch.manual_seed(0)
    case = APART[name]
    model = case.build()
    loss = partial(case.loss, model)
    private = run_of(model, dataset_of(case), loss)
    train(private, loss)
    assert private.steps == 3


@pytest.mark.parametrize("name", ["the index in the batch", "a gate at zero", "a loop until all have converged"])
def test_a_compiled_step_tests_its_loss(name: str) -> None:
    torch.manual_seed(0)
    case = COUPLED[name]
    model = case.build()
    private = run_of(model, dataset_of(case), None)
    step = private.compiled(partial(case.loss, model))
    with pytest.raises(CoupledExamplesError):
        step(*next(iter(private.loader)))
    assert private.steps == 0


def counted(model: nn.Module) -> tuple[Callable[..., Tensor], list[int]]:
    calls: list[int] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        return losses_of(model, x, y)

    return loss, calls


@pytest.mark.parametrize("is_compiled", [False, True])
def test_only_two_batches_are_tested(is_compiled: bool) -> None:
    model = network()
    loss, calls = counted(model)
    _, private = private_run(model, loss=None if is_compiled else loss, sampling="fixed-size")
    step = private.compiled(loss) if is_compiled else lambda *batch: private.step(loss(*batch))
    a_step = []
    for batch in private.loader:
        before = len(calls)
        step(*batch)
        a_step.append(len(calls) - before)
    if is_compiled:
        assert all(count > 20 for count in a_step[:2]) and a_step[2:] == [1] * 3
    else:
        assert len(calls) > 5 + 2 * 20 and a_step == [1] * 5


def test_each_batch_is_tested_once() -> None:
    model = network()
    loss, calls = counted(model)
    _, private = private_run(model, loss=loss, sampling="fixed-size")
    next(iter(private.loader))
    first = len(calls)
    next(iter(private.loader))
    assert first > 20 and len(calls) == first


def test_batches_of_fewer_than_two_examples_are_not_tested() -> None:
    model = network()
    loss, calls = counted(model)
    _, private = private_run(model, loss=loss, batch_size=1, sampling="fixed-size")
    for batch in private.loader:
        private.step(losses_of_batch(model, batch))
        if private.steps == 4:
            break
    assert not calls


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_test_changes_no_result(is_compiled: bool) -> None:
    """Weights and random numbers of the run stay the same."""
    found = []
    for with_loss in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        loss = partial(losses_of, model)
        _, private = private_run(model, loss=loss if with_loss else None, seed=1)
        step = private.compiled() if is_compiled and with_loss else lambda x, y, p=private, f=loss: p.step(f(x, y))
        for batch in private.loader:
            step(*batch)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_coupled_losses_are_accepted_with_batch_clipping() -> None:
    model = network()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model, x - x.mean(0), y)

    _, private = private_run(model, loss=loss, clipping=clipwise.Batch(max_norm=1.0))
    train(private, loss)
    assert private.steps == 3


def test_a_loss_that_cannot_be_called_with_the_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="loss must be a function"):
        private_run(loss=3)
    _, private = private_run(loss=lambda x: x, sampling="full")
    with pytest.raises(ConfigurationError, match=r"called as loss\(\*batch\)"):
        next(iter(private.loader))
    with pytest.raises(ConfigurationError, match="needs a loss"):
        private_run()[1].compiled()


# -- mappings


class Records(Dataset[dict[str, Any]]):
    def __init__(self, with_text: bool = False) -> None:
        self._rows, self._with_text = data(SIZE), with_text

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self._rows[index]
        return {"x": x, "y": y} | ({"text": f"record {index}"} if self._with_text else {})


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_mapping_is_one_argument_everywhere(is_compiled: bool, with_text: bool) -> None:
    model = network()

    def loss(batch: dict[str, Any]) -> Tensor:
        assert not with_text or len(batch["text"]) == len(batch["x"])
        return losses_of(model, batch["x"], batch["y"])

    private = run_of(model, Records(with_text), loss)
    step = private.compiled() if is_compiled else lambda batch: private.step(loss(batch))
    for batch in private.loader:
        assert step(batch)
    coupled = run_of(network(), Records(with_text), lambda batch: loss(batch) / len(batch["x"]))
    with pytest.raises(CoupledExamplesError, match="moved"):
        next(iter(coupled.loader))


def test_views_of_a_mapping_train() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    records = [{"label": torch.tensor(i % 3), "pixels": torch.rand(1, 8, 8)} for i in range(SIZE)]

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return losses_of(model, batch["pixels"], batch["label"])

    private = run_of(model, records, loss, augmentation=Views(2, Crop(8, 2), Flip()))
    train(private, loss)
    assert private.steps == 3


# -- collation


Collate = Callable[[list[Any]], Any]


def texts() -> list[tuple[Tensor, int]]:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 7, (SIZE,), generator=random)
    return [(torch.randint(1, WORDS, (int(n),), generator=random), i % 3) for i, n in enumerate(lengths)]


def to_the_longest(records: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    x = nn.utils.rnn.pad_sequence([x for x, _ in records], batch_first=True)
    return x, torch.tensor([y for _, y in records])


class Bag(nn.Module):
    """The mean of words, with or without padding."""

    def __init__(self, over_padding: bool) -> None:
        super().__init__()
        self.words, self.head, self._over_padding = nn.Embedding(WORDS, 8), nn.Linear(8, 3), over_padding

    def forward(self, x_BT: Tensor) -> Tensor:
        is_word = (x_BT != 0)[..., None]
        h = (self.words(x_BT) * is_word).sum(1)
        return self.head(h / (x_BT.shape[1] if self._over_padding else is_word.sum(1)))


def mixup(records: list[Any]) -> tuple[Tensor, ...]:
    x, y = default_collate(records)
    share, other = np.random.beta(1.0, 1.0), torch.randperm(len(x))
    return share * x + (1 - share) * x[other], y


def centred(records: list[Any]) -> tuple[Tensor, ...]:
    x, y = default_collate(records)
    return x - x.mean(0), y


def packed(records: list[Any]) -> tuple[Tensor, ...]:
    """One row of all words, and the start of each text."""
    lengths = torch.tensor([len(x) for x, _ in records])
    return torch.cat([x for x, _ in records])[None], lengths, torch.tensor([y for _, y in records])


class PackedBag(nn.Module):
    """Takes a packed batch, with positions counted in the text or in the batch."""

    def __init__(self, in_batch: bool) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(WORDS, 8), nn.Embedding(200, 8), nn.Linear(8, 3)
        self._in_batch = in_batch

    def forward(self, x_1N: Tensor, lengths_B: Tensor) -> Tensor:
        places = [torch.arange(int(n)) for n in lengths_B]
        at_N = torch.arange(x_1N.shape[1]) if self._in_batch else torch.cat([*places, torch.arange(0)])
        words_N = self.words(x_1N[0]) * self.positions(at_N)
        owner_N = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        return self.head(torch.zeros(len(lengths_B), 8).index_add(0, owner_N, words_N))


COLLATED: dict[str, tuple[Callable[[], nn.Module], Collate, Any]] = {
    "mixup": (perceptron, mixup, data(SIZE)),
    "normalisation over the batch": (perceptron, centred, data(SIZE)),
    "a mean over padding": (partial(Bag, True), to_the_longest, texts()),
}


@pytest.mark.parametrize("name", COLLATED)
def test_records_mixed_in_collate_fn_are_refused(name: str) -> None:
    torch.manual_seed(0)
    build, collate, records = COLLATED[name]
    model = build()
    loss = partial(losses_of, model)
    refused(run_of(model, records, loss, collate_fn=collate), loss)
    passed = run_of(model, records, None, collate_fn=collate)  # a compiled step gets the loader's batches
    with pytest.raises(CoupledExamplesError):
        passed.compiled(loss)(*next(iter(passed.loader)))
    assert passed.steps == 0


def test_records_mixed_in_collate_fn_are_refused_with_workers() -> None:
    model = perceptron()
    loss = partial(losses_of, model)
    refused(run_of(model, data(SIZE), loss, collate_fn=mixup, num_workers=1), loss)


class Fetched(Dataset[Any]):
    """Fetches records together, and optionally normalises them."""

    def __init__(self, is_normalised: bool) -> None:
        self._rows, self._is_normalised = data(SIZE), is_normalised

    def __len__(self) -> int:
        return SIZE

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        x, y = self._rows[list(indices)]
        return list(zip(x - x.mean() if self._is_normalised else x, y, strict=True))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


def test_records_mixed_in_getitems_are_refused() -> None:
    model = perceptron()
    loss = partial(losses_of, model)
    refused(run_of(model, Fetched(True), loss), loss)
    private = run_of(model, Fetched(False), loss)
    train(private, loss)
    assert private.steps == 3


def test_a_position_in_a_packed_batch_is_refused() -> None:
    """A packed batch has no row per example: only its records can be collated again."""
    for in_batch in (True, False):
        torch.manual_seed(0)
        model = PackedBag(in_batch)

        def loss(x: Tensor, lengths: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return F.cross_entropy(model(x, lengths), y, reduction="none")

        private = run_of(model, texts(), loss, collate_fn=packed, probe_independence=False)
        if in_batch:
            refused(private, loss)
        else:
            next(iter(private.loader))


class Augmented(Dataset[Any]):
    """Augments each record at random, as `augmenting` does in collate_fn."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        x, y = data(SIZE)[index]
        return x + torch.randn(()), y


def augmenting(records: list[Any]) -> tuple[Tensor, ...]:
    x, y = default_collate(records)
    return x * (1 + torch.rand(len(x), 1)), y


def masked(records: list[Any]) -> tuple[Tensor, Tensor]:
    """Drops words at random. The number of draws depends on the longest text."""
    x, y = to_the_longest(records)
    return torch.where(torch.rand(x.shape) < 0.3, 1, x) * (x != 0), y


def taking_apart(records: list[Any]) -> tuple[Tensor, ...]:
    """Empties its records."""
    labels = torch.stack([record.pop("y") for record in records])
    return default_collate(records)["x"], labels


@pytest.mark.parametrize(
    ("build", "collate", "records"),
    [
        (partial(Bag, False), to_the_longest, texts()),
        (partial(Bag, False), masked, texts()),
        (perceptron, None, Augmented()),
        (perceptron, default_collate, Augmented()),
        (perceptron, augmenting, Augmented()),
        (perceptron, taking_apart, Records()),
        (lambda: perceptron(nn.Dropout(0.5)), default_collate, Augmented()),
    ],
)
def test_uncoupled_collation_is_accepted(build: Callable[[], nn.Module], collate: Collate | None, records: Any) -> None:
    torch.manual_seed(0)
    model = build()
    loss = partial(losses_of, model)
    for _ in range(3):
        with run_of(model, copy.deepcopy(records), loss, collate_fn=collate) as private:
            train(private, loss)
            assert private.steps == 3


def test_views_with_a_collate_fn() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    loss = partial(losses_of, model)
    images = TensorDataset(torch.rand(SIZE, 1, 10, 10), torch.arange(SIZE) % 3)
    views = {"augmentation": Views(2, Crop(8, 0), Flip())}
    with run_of(model, images, loss, collate_fn=default_collate, **views) as private:
        train(private, loss)
        assert private.steps == 3
    refused(run_of(model, images, loss, collate_fn=mixup, **views), loss)


# -- messages


def test_no_refusal_depends_on_the_data() -> None:
    """The message is the same for all data and batch sizes."""
    found = set()
    for seed in range(4):
        torch.manual_seed(seed)
        model = network()
        rows = data(30 + seed, seed=seed)

        def loss(x: Tensor, y: Tensor, model: nn.Module = model, seed: int = seed) -> Tensor:
            return losses_of(model, x, y) / (len(x) if seed % 2 else x.detach().abs().sum())

        found.add(refused(run_of(model, rows, loss, sampling="fixed-size", batch_size=6 + seed), loss))
    (message,) = found
    assert not any(character.isdigit() for character in message)


@pytest.fixture
def recommending() -> Iterator[None]:
    first_batches.recommend_check.cache_clear()
    yield
    first_batches.recommend_check.cache_clear()


@pytest.mark.usefixtures("recommending")
def test_a_hand_written_loop_logs_a_recommendation_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "clipwise"):
        for _ in range(2):
            model, private = private_run()
            train(private, partial(losses_of, model))
    (record,) = caplog.records
    assert "clipwise.check" in record.message and "loss=" in record.message


@pytest.mark.usefixtures("recommending")
def test_a_run_with_a_replacement_test_logs_no_recommendation(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "clipwise"):
        model = network()
        train(private_run(model, loss=partial(losses_of, model))[1], partial(losses_of, model))
        model, private = private_run()
        step = private.compiled(partial(losses_of, model))
        for batch in private.loader:
            step(*batch)
        model, private = private_run(clipping=clipwise.Batch(max_norm=1.0))
        train(private, partial(losses_of, model))
    assert not caplog.records


def stated(private: clipwise.Private) -> tuple[str, Statement]:
    statement = private.statement()
    (line,) = [text for text in statement.assumptions() if text.startswith("each loss depends")]
    return line, statement


def test_the_statement_lists_the_planned_tests(tmp_path: Any) -> None:
    model = network()
    loss = partial(losses_of, model)
    line, statement = stated(run_of(model, data(SIZE), None))
    assert "no replacement test could run" in line and statement.to_dict()["planned_tests"] == []
    assert "epsilon does not cover" in str(statement)
    line, statement = stated(run_of(network(), data(SIZE), loss))
    assert "replacement test of the losses was planned" in line and statement.planned_tests == ("replacement",)
    ledger = tmp_path / "ledger"
    with run_of(model, data(SIZE), loss, collate_fn=default_collate, ledger=ledger) as private:
        train(private, loss)
        line, statement = stated(private)
    assert "the collation of records" in line and statement.planned_tests == ("replacement", "collation")
    assert clipwise.report.statement.of_ledger(ledger).planned_tests == ("replacement", "collation")


def test_a_later_compiled_step_does_not_cover_earlier_steps() -> None:
    model = network()
    loss = partial(losses_of, model)
    private = run_of(model, data(SIZE), None)
    batches = iter(private.loader)
    private.step(loss(*next(batches)))
    step = private.compiled(loss)
    step(*next(iter(private.loader)))
    assert "no replacement test could run" in stated(private)[0]
