"""`trainer.fit` with `PrivateStrategy`, equal to the plain clipwise loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import clipwise

pytest.importorskip("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from clipwise.integrations.lightning import PrivateStrategy

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SIZE, BATCH = 48, 8


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield


class Model(pl.LightningModule):
    def __init__(self, returns: str = "loss") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.returns = returns

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.returns == "logged":
            self.log("train_loss", loss)
        return {"loss": loss, "None": None}.get(self.returns, {"loss": loss})

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SIZE, 5, generator=random), torch.randint(0, 3, (SIZE,), generator=random))


def model(returns: str = "loss") -> Model:
    torch.manual_seed(0)
    return Model(returns)


def trainer(folder: Path, strategy: PrivateStrategy, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    return pl.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, strategy=strategy, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1, **options,
    )  # fmt: skip


def plain() -> list[Tensor]:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    private = clipwise.make_private(module.net, optimizer, data(), batch_size=BATCH, noise_multiplier=1.0, seed=3)
    for _ in range(2):
        for x, y in private.loader:
            private.step(F.cross_entropy(module.net(x), y, reduction="none") if len(x) else None)
        scheduler.step()
    return list(module.parameters())


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 3}], ids=["whole", "pieces"])
@pytest.mark.parametrize("returns", ["loss", "dict"])
def test_fit_equals_the_plain_loop(tmp_path: Path, returns: str, options: dict[str, Any]) -> None:
    module, strategy = model(returns), PrivateStrategy(noise_multiplier=1.0, seed=3, **options)
    fit = trainer(tmp_path, strategy)
    fit.fit(module, DataLoader(data(), BATCH, shuffle=True), DataLoader(data(), 16))
    assert fit.global_step == strategy.private.steps == 12
    for mine, other in zip(module.parameters(), plain(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    strategy.private.statement()


def test_checkpoints_are_written_and_epsilon_is_logged(tmp_path: Path) -> None:
    strategy = PrivateStrategy(epsilon=3.0, delta=1e-3)
    logger, checkpoints = CSVLogger(tmp_path), ModelCheckpoint(tmp_path / "saved", every_n_train_steps=6, save_top_k=-1)
    fit = trainer(tmp_path, strategy, logger=logger, enable_checkpointing=True, callbacks=[checkpoints])
    with warnings.catch_warnings():
        warnings.simplefilter("error", clipwise.PrivacyWarning)  # epsilon is public
        fit.fit(model(), DataLoader(data(), BATCH))
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt"]
    assert 2.5 < fit.callback_metrics["epsilon"] <= 3.0
    assert "epsilon" in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert strategy.private.steps == 12


def test_a_checkpoint_continues_the_count(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    first = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0), max_epochs=1)
    first.fit(model(), DataLoader(data(), BATCH))
    first.save_checkpoint(path)
    strategy = PrivateStrategy(noise_multiplier=1.0)
    second = trainer(tmp_path, strategy, max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", clipwise.PrivacyWarning)
        second.fit(model(), DataLoader(data(), BATCH), ckpt_path=path, weights_only=True)
    assert second.global_step == strategy.private.steps == 12
    second.fit_loop.max_epochs = 3
    second.fit(second.lightning_module, DataLoader(data(), BATCH))
    assert strategy.private.steps == 18


def test_a_second_fit_counts_the_first(tmp_path: Path) -> None:
    module, strategy = model(), PrivateStrategy(noise_multiplier=1.0, delta=1e-3)
    fit = trainer(tmp_path, strategy)
    fit.fit(module, DataLoader(data(), BATCH))
    once = strategy.private.spent()
    fit.fit_loop.max_epochs = 4
    fit.fit(module, DataLoader(data(), BATCH))
    twice = strategy.private.spent()
    assert (once.steps, twice.steps) == (12, 24) and twice.epsilon > once.epsilon


def test_a_budget_is_that_of_all_fits(tmp_path: Path) -> None:
    module, strategy = model(), PrivateStrategy(epsilon=3.0, delta=1e-3)
    fit = trainer(tmp_path, strategy)
    fit.fit(module, DataLoader(data(), BATCH))
    with pytest.raises(clipwise.ConfigurationError, match="used up"):
        fit.fit(module, DataLoader(data(), BATCH))


def test_max_steps_plans_the_noise(tmp_path: Path) -> None:
    strategy = PrivateStrategy(epsilon=3.0, delta=1e-3)
    fit = trainer(tmp_path, strategy, max_epochs=-1, max_steps=9)
    fit.fit(model(), DataLoader(data(), BATCH))
    assert fit.global_step == strategy.private.steps == 9
    assert 2.5 < strategy.private.spent().epsilon <= 3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"precision": "16-true"}, "precision"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    fit = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0), **options)
    with pytest.raises(clipwise.ConfigurationError, match=message):
        fit.fit(model(), DataLoader(data(), BATCH))


def test_a_wrong_loader_or_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(clipwise.ConfigurationError, match="drop_last"):
        trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0)).fit(model(), DataLoader(data(), 5, drop_last=True))
    manual = model()
    manual.automatic_optimization = False
    with pytest.raises(clipwise.ConfigurationError, match="automatic_optimization"):
        trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0)).fit(manual, DataLoader(data(), BATCH))
    with pytest.raises(clipwise.StepError, match="returned None"):
        trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0)).fit(model("None"), DataLoader(data(), BATCH))


@pytest.mark.parametrize("sanity_steps", [0, 2])
def test_an_evaluation_on_the_training_records_is_refused(tmp_path: Path, sanity_steps: int) -> None:
    rows = data()
    fit = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0), num_sanity_val_steps=sanity_steps)
    with pytest.raises(clipwise.ConfigurationError, match="evaluate on other records"):
        fit.fit(model(), DataLoader(rows, BATCH), DataLoader(rows, 16))
    assert not fit.callback_metrics
    fit = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0))
    fit.fit(model(), DataLoader(rows, BATCH), DataLoader(data(), 16))
    with pytest.raises(clipwise.ConfigurationError, match="evaluate on other records"):
        fit.validate(fit.lightning_module, DataLoader(rows, 16))


def test_a_value_of_the_training_batches_in_the_log_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(clipwise.PrivacyWarning, match="train_loss"):
        trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0)).fit(model("logged"), DataLoader(data(), BATCH))
