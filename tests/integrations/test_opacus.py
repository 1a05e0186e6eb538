"""Scripts with the calls of Opacus' tutorials, on generated data, equal to the plain clipwise loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import clipwise
from clipwise.integrations.opacus import (
    DPLSTM,
    BatchMemoryManager,
    DifferentiallyPrivateDistributedDataParallel,
    ModuleValidator,
    PrivacyEngine,
    get_noise_multiplier,
)
from tests.distributed.world import World, world

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

SIZE, BATCH, CLASSES = 48, 8, 3


class ImageClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 2, padding=1), nn.Conv2d(4, 4, 3)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        return self.fc(F.relu(self.conv2(F.pad(x, (1, 0, 1, 0)))).flatten(1)[:, :16])


class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lstm, self.fc = nn.Embedding(20, 6), DPLSTM(6, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(self.emb(x))
        return self.fc(out[:, -1])


class CharLSTM(nn.Module):
    """Classes of names, with an initial state for each row, as in the character example."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lstm, self.out = (
            nn.Embedding(27, 6),
            DPLSTM(6, 5, num_layers=2, batch_first=True),
            nn.Linear(5, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(2, len(x), 5), torch.zeros(2, len(x), 5)
        out, _ = self.lstm(self.emb(x), state)
        return self.out(out[:, -1, :])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "image classifier": (ImageClassifier, lambda: torch.randn(SIZE, 1, 9, 9)),
    "LSTM on text": (TextClassifier, lambda: torch.randint(0, 20, (SIZE, 7))),
    "character LSTM": (CharLSTM, lambda: torch.randint(0, 27, (SIZE, 5))),
}


def parts_of(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    make, inputs = MODELS[kind]
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return model, optimizer, TensorDataset(inputs(), torch.randint(0, CLASSES, (SIZE,)))


def trained_plainly(kind: str, epochs: int = 2, **options: Any) -> list[Tensor]:
    model, optimizer, data = parts_of(kind)
    options = {"sample_rate": BATCH / SIZE, "noise_multiplier": 1.0} | options
    private = clipwise.make_private(model, optimizer, data, seed=3, **options)
    for _ in range(epochs):
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)
    return list(model.parameters())


def assert_equal(model: nn.Module, others: list[Tensor]) -> None:
    for mine, other in zip(model.parameters(), others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_a_tutorial_script_equals_the_plain_loop(kind: str) -> None:
    model, optimizer, data = parts_of(kind)
    original, criterion = model, nn.CrossEntropyLoss()
    engine = PrivacyEngine(seed=3)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=BATCH, shuffle=True),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    assert model is original
    steps = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            steps += 1
    assert steps == len(loader) * 2 == engine.private.steps
    assert_equal(model, trained_plainly(kind))
    assert engine.accountant.get_epsilon(delta=1e-5) == pytest.approx(
        clipwise.accounting.epsilon(noise_multiplier=1.0, sample_rate=BATCH / SIZE, steps=steps, delta=1e-5), rel=1e-6
    )
    assert "BackwardHook" not in str(model._backward_hooks) and not model._forward_hooks


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_budget_for_epochs_ends_where_it_was_planned(accountant: str) -> None:
    model, optimizer, data = parts_of("image classifier")
    engine = PrivacyEngine(accountant=accountant)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=BATCH), target_epsilon=3.0,
        target_delta=1e-3, epochs=1, max_grad_norm=1.0,
    )  # fmt: skip

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    epoch()
    assert 2.5 < engine.get_epsilon(1e-3) <= 3.0
    with pytest.raises(clipwise.BudgetExhausted):
        epoch()


def test_batch_memory_manager_changes_no_result() -> None:
    model, optimizer, data = parts_of("LSTM on text")
    momentum = torch.optim.Adam(model.parameters(), lr=0.05)
    engine = PrivacyEngine(seed=3)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=momentum, data_loader=DataLoader(data, batch_size=24), noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    pieces = 0
    for _ in range(2):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as small:
            for x, y in small:
                assert len(x) <= 5
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                pieces += 1
    assert pieces > engine.private.steps == 4

    other, _, _ = parts_of("LSTM on text")
    private = clipwise.make_private(
        other, torch.optim.Adam(other.parameters(), lr=0.05), data, sample_rate=0.5, noise_multiplier=1.0, seed=3
    )
    for _ in range(2):
        for x, y in private.loader:
            private.step(F.cross_entropy(other(x), y, reduction="none"))
    assert_equal(model, list(other.parameters()))
    engine.private.statement()


@pytest.mark.parametrize("name", ["signal_skip_step", "virtual_step"])
def test_a_step_that_the_script_skips_is_refused(name: str) -> None:
    model, optimizer, data = parts_of("image classifier")
    _, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), noise_multiplier=1.0, max_grad_norm=1.0
    )
    with pytest.raises(clipwise.ConfigurationError, match=r"skipped by hand.*BatchMemoryManager"):
        getattr(optimizer, name)()


def test_gradients_of_several_batches_are_not_accumulated() -> None:
    model, optimizer, data = parts_of("image classifier")
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), noise_multiplier=1.0, max_grad_norm=1.0
    )
    with pytest.raises(clipwise.StepError):
        for i, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with world(2) as started:
        yield started


def distributed_script(rank: int, is_cut: bool) -> list[Tensor]:
    """The batch size is that of all ranks, as in Opacus."""
    model, optimizer, data = parts_of("image classifier")
    model = DifferentiallyPrivateDistributedDataParallel(model)
    model, optimizer, loader = PrivacyEngine(seed=3).make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), noise_multiplier=1.0, max_grad_norm=1.0
    )
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as pieces:
        for _ in range(2):
            for x, y in pieces if is_cut else loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "pieces"])
def test_two_processes_train_the_model_of_one(two: World, is_cut: bool) -> None:
    expected = trained_plainly("image classifier")
    for found in two.run(distributed_script, is_cut):
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_gan_trains_its_discriminator_privately() -> None:
    torch.manual_seed(0)
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in generator.parameters()]
    engine = PrivacyEngine()
    discriminator, d_optimizer, loader = engine.make_private(
        module=discriminator, optimizer=d_optimizer, data_loader=DataLoader(TensorDataset(torch.randn(SIZE, 6)), BATCH),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    criterion = nn.BCELoss()
    for (real,) in loader:
        rows = len(real)
        d_optimizer.zero_grad(set_to_none=True)
        fake = generator(torch.randn(rows, 3))
        error = criterion(discriminator(real).squeeze(1), torch.ones(rows))
        error = error + criterion(discriminator(fake.detach()).squeeze(1), torch.zeros(rows))
        error.backward()
        d_optimizer.step()
        d_optimizer.zero_grad(set_to_none=True)
        g_optimizer.zero_grad()
        criterion(discriminator(fake).squeeze(1), torch.ones(rows)).backward()
        g_optimizer.step()
    assert engine.private.steps == len(loader)
    assert all(not torch.equal(p, old) for p, old in zip(generator.parameters(), before, strict=True))
    d_optimizer.zero_grad()
    engine.private.statement()


def test_fine_tuning_bert_with_the_loss_of_its_own_head() -> None:
    transformers = pytest.importorskip("transformers")

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
                max_position_embeddings=8, num_labels=CLASSES, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        ).train()  # fmt: skip
        for part in (model.bert.embeddings, model.bert.encoder.layer[0]):
            part.requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    ids = torch.randint(1, 20, (SIZE, 6))
    data = TensorDataset(ids, (torch.arange(6) < 4).long().expand(SIZE, 6).clone(), torch.randint(0, CLASSES, (SIZE,)))
    engine = PrivacyEngine(seed=3)
    model, optimizer, loader = engine.make_private(
        module=(parts := made())[0], optimizer=parts[1], data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0, max_grad_norm=0.1,
    )  # fmt: skip
    for input_ids, mask, labels in loader:
        optimizer.zero_grad()
        loss = model(input_ids=input_ids, attention_mask=mask, labels=labels)[0]
        loss.backward()
        optimizer.step()
    assert len(loader.dataset) == SIZE

    other, optimizer = made()
    private = clipwise.make_private(
        other, optimizer, data, sample_rate=BATCH / SIZE, noise_multiplier=1.0, seed=3,
        clipping=clipwise.PerExample(max_norm=0.1),
    )  # fmt: skip
    for input_ids, mask, labels in private.loader:
        logits = other(input_ids=input_ids, attention_mask=mask).logits
        private.step(F.cross_entropy(logits, labels, reduction="none"))
    assert_equal(model, list(other.parameters()))


def test_the_optimizer_has_the_noise_multiplier_that_scripts_print() -> None:
    model, optimizer, data = parts_of("image classifier")
    engine = PrivacyEngine()
    _, optimizer, _ = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH),
        target_epsilon=3.0, target_delta=1e-5, epochs=2, max_grad_norm=1.0,
    )  # fmt: skip
    assert optimizer.noise_multiplier == engine.private.noise_multiplier


def test_the_noise_of_a_budget() -> None:
    found = get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=1 / 49, epochs=2)
    assert found == clipwise.accounting.noise_multiplier(epsilon=3.0, delta=1e-5, sample_rate=1 / 49, steps=98)
    with pytest.raises(clipwise.ConfigurationError, match="epochs or steps"):
        get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.1)


def test_an_evaluation_inside_the_loop_runs_unchanged() -> None:
    model, optimizer, data = parts_of("image classifier")
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), noise_multiplier=1.0, max_grad_norm=1.0
    )
    x_test, y_test = torch.randn(7, 1, 9, 9), torch.randint(0, CLASSES, (7,))
    for x, y in loader:
        with torch.no_grad():
            before = F.cross_entropy(model(x_test), y_test)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after = F.cross_entropy(model(x_test), y_test)
        assert after.requires_grad and torch.isfinite(before)
        break
    loss = F.cross_entropy(model(x_test), y_test)  # no mode is left behind
    assert type(loss.grad_fn).__name__ == "NllLossBackward0"


def test_ghost_mode_returns_the_criterion() -> None:
    model, optimizer, data = parts_of("image classifier")
    criterion = nn.CrossEntropyLoss()
    engine = PrivacyEngine(seed=3)
    model, optimizer, returned, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), criterion=criterion,
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost",
    )  # fmt: skip
    assert returned is criterion
    for _ in range(2):
        for x, y in loader:
            returned(model(x), y).backward()
            optimizer.step()
    assert_equal(model, trained_plainly("image classifier"))


def test_a_shuffled_loader_is_accounted_without_amplification() -> None:
    model, optimizer, data = parts_of("image classifier")
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH, shuffle=True), noise_multiplier=2.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    for x, y in loader:
        assert len(x) == BATCH
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    one = clipwise.accounting.epsilon(noise_multiplier=2.0, sample_rate=1.0, steps=1, delta=1e-5, sampling="full")
    assert engine.get_epsilon(1e-5) == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"clipping": "per_layer", "max_grad_norm": [0.5] * 6},
        {"clipping": "adaptive", "max_grad_norm": 1.0, "target_unclipped_quantile": 0.5, "unclipped_num_std": 4.0},
        {"grad_sample_mode": "functorch", "max_grad_norm": 1.0},
    ],
    ids=lambda o: str(o.get("clipping", "functorch")),
)
def test_options_of_opacus(options: dict[str, Any]) -> None:
    model, optimizer, data = parts_of("image classifier")
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), noise_multiplier=1.0, **options
    )
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-5) >= engine.private.spent(delta=1e-5).epsilon


def test_a_checkpoint_continues_the_count(tmp_path: Path) -> None:
    def made() -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer, Any]:
        model, optimizer, data = parts_of("image classifier")
        engine = PrivacyEngine()
        return engine, *engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), noise_multiplier=1.0,
            max_grad_norm=1.0,
        )  # fmt: skip

    engine, model, optimizer, loader = made()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
    spent = engine.get_epsilon(1e-5)
    engine, model, optimizer, loader = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", clipwise.PrivacyWarning)
        assert engine.load_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)["epoch"] == 1
    assert engine.get_epsilon(1e-5) == spent


def test_the_validator_replaces_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    assert not ModuleValidator.is_valid(model) and ModuleValidator.validate(model)
    assert ModuleValidator.is_valid(ModuleValidator.fix(model))
    assert isinstance(model[1], nn.BatchNorm2d)
    assert not PrivacyEngine().is_compatible(module=model)


def test_an_embedding_bag_has_its_true_norm() -> None:
    """A row that a bag holds several times has one gradient. Compared with one backward pass per example."""
    data = TensorDataset(torch.randint(0, 3, (SIZE, 6)), torch.randint(0, CLASSES, (SIZE,)))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, CLASSES))
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    model, optimizer = made()
    engine = PrivacyEngine(seed=3)
    model, optimizer, criterion, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, 24), noise_multiplier=0.1, max_grad_norm=0.5,
        grad_sample_mode="ghost",
    )  # fmt: skip
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    reference, optimizer = made()
    private = clipwise.make_private(
        reference, optimizer, data, sample_rate=0.5, noise_multiplier=0.1, seed=3,
        clipping=clipwise.PerExample(max_norm=0.5, method="loop"),
    )  # fmt: skip
    for x, y in private.loader:
        private.step(F.cross_entropy(reference(x), y, reduction="none"))
    assert_equal(model, list(reference.parameters()))


def wrong(**options: Any) -> Callable[[], object]:
    def call() -> object:
        model, optimizer, data = parts_of("image classifier")
        loader = options.pop("data_loader", None) or DataLoader(data, BATCH, **options.pop("loader", {}))
        engine = PrivacyEngine(accountant=options.pop("accountant", "prv"))
        arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
        return engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **arguments)

    return call


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (wrong(loader={"drop_last": True}), "drop_last"),
        (wrong(loader={"sampler": torch.utils.data.SubsetRandomSampler([1, 2])}), "sampler SubsetRandomSampler"),
        (wrong(loader={"worker_init_fn": print}), "worker_init_fn"),
        (wrong(data_loader=[1]), "DataLoader, not list"),
        (wrong(loss_reduction="sum"), "loss_reduction"),
        (wrong(noise_generator=torch.Generator()), "noise_generator"),
        (wrong(accountant="gdp"), "gdp"),
        (wrong(max_grad_norm=[1.0, 1.0]), "per_layer"),
        (wrong(max_grad_norm=[1.0], clipping="per_layer"), "one number for each"),
        (wrong(clipping="ghost"), "clipping='ghost'"),
        (wrong(criterion=nn.CrossEntropyLoss(reduction="sum")), "reduction='sum'"),
        (wrong(normalise=True), "'normalise'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_combination_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(clipwise.ConfigurationError, match=message):
        call()


def test_what_a_second_execution_of_a_cell_passes_is_named() -> None:
    model, optimizer, data = parts_of("image classifier")
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), **options
    )
    with pytest.raises(clipwise.ConfigurationError, match="already, as when a cell of a notebook is executed twice"):
        PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader, **options)


def test_a_loss_without_known_terms_is_refused() -> None:
    model, optimizer, data = parts_of("image classifier")
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, BATCH), noise_multiplier=1.0, max_grad_norm=1.0
    )
    with pytest.raises(clipwise.StepError, match="per-example terms of the loss are not known"):
        for x, _ in loader:
            model(x).logsumexp(0).sum().backward()


def test_the_memory_manager_takes_the_loader_and_optimizer_of_one_run() -> None:
    _, optimizer, data = parts_of("image classifier")
    with pytest.raises(clipwise.ConfigurationError, match="loader that PrivacyEngine"):
        BatchMemoryManager(data_loader=DataLoader(data), max_physical_batch_size=2, optimizer=optimizer)
