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
from torch.utils.data import DataLoader, Subset, TensorDataset

import clipwise

pytest.importorskip("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
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
    fit.fit_loop.max_epochs = 4
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
    with pytest.raises(clipwise.ConfigurationError, match=r"compiled LightningModule.*without torch.compile"):
        compiled = torch.compile(model(), backend="eager")
        trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0)).fit(compiled, DataLoader(data(), BATCH))
    with pytest.raises(clipwise.StepError, match="returned None"):
        trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0)).fit(model("None"), DataLoader(data(), BATCH))


@pytest.mark.parametrize(
    "callback",
    [GradientAccumulationScheduler({0: 2}), StochasticWeightAveraging(0.1), EMAWeightAveraging(), LearningRateFinder()],
    ids=lambda callback: type(callback).__name__,
)
def test_a_callback_that_trains_or_steps_is_refused(tmp_path: Path, callback: pl.Callback) -> None:
    fit = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0), callbacks=[callback])
    with pytest.raises(clipwise.ConfigurationError, match=type(callback).__name__):
        fit.fit(model(), DataLoader(data(), BATCH))


def test_a_callback_that_monitors_a_training_value_is_refused(tmp_path: Path) -> None:
    fit = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0), callbacks=[EarlyStopping("train_loss")])
    with pytest.raises(clipwise.ConfigurationError, match="EarlyStopping monitors 'train_loss'"):
        fit.fit(model("logged"), DataLoader(data(), BATCH))


class Scheduled(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        self.planned = self.trainer.estimated_stepping_batches, len(self.trainer.train_dataloader.dataset)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=int(self.planned[0]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


@pytest.mark.parametrize("options", [{}, {"sample_rate": 0.25}, {"sampling": "full"}], ids=str)
def test_a_schedule_may_ask_for_the_number_of_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    module, strategy = Scheduled(), PrivateStrategy(noise_multiplier=1.0, **options)
    fit = trainer(tmp_path, strategy)
    fit.fit(module, DataLoader(data(), BATCH), DataLoader(data(), 16))
    assert module.planned == (strategy.private.steps, SIZE)


def test_a_checkpoint_within_an_epoch_continues_with_equal_masks(tmp_path: Path) -> None:
    def made() -> tuple[Model, PrivateStrategy]:
        module = model()
        module.net.insert(2, nn.Dropout(0.5))
        return module, PrivateStrategy(noise_multiplier=1.0, seed=3, ledger=tmp_path / "ledger")

    torch.manual_seed(1)  # as `seed_everything` does
    whole, strategy = made()
    trainer(tmp_path, strategy).fit(whole, DataLoader(data(), BATCH))
    (tmp_path / "ledger").unlink()
    first, strategy = made()
    saved = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=8, save_top_k=-1)
    fit = trainer(tmp_path, strategy, enable_checkpointing=True, callbacks=[saved, _StopAt(8)])
    fit.fit(first, DataLoader(data(), BATCH))
    second, strategy = made()
    fit = trainer(tmp_path, strategy)
    fit.fit(second, DataLoader(data(), BATCH), ckpt_path=tmp_path / "saved" / "epoch=1-step=8.ckpt", weights_only=True)
    assert fit.global_step == strategy.private.steps == 12
    for mine, other in zip(second.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


class _StopAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.step


def test_releases_after_a_checkpoint_stay_counted(tmp_path: Path) -> None:
    module, strategy = model(), PrivateStrategy(noise_multiplier=1.0, delta=1e-3)
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1)
    fit = trainer(tmp_path, strategy, enable_checkpointing=True, callbacks=[saved])
    fit.fit(module, DataLoader(data(), BATCH))
    early = tmp_path / "epoch=0-step=6.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", clipwise.PrivacyWarning)
        fit.validate(module, DataLoader(data(), BATCH), ckpt_path=early, verbose=False, weights_only=True)
        fit.fit(module, DataLoader(data(), BATCH), ckpt_path=early, weights_only=True)
    assert strategy.private.spent().steps == 18


def test_a_checkpoint_without_a_private_run_is_refused(tmp_path: Path) -> None:
    plain = pl.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    plain.fit(model(), DataLoader(data(), BATCH))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    fit = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0))
    with pytest.raises(clipwise.CheckpointError, match=r"plain\.ckpt.*would not be counted"):
        fit.fit(model(), DataLoader(data(), BATCH), ckpt_path=tmp_path / "plain.ckpt", weights_only=True)


def test_several_loaders_and_users_are_refused(tmp_path: Path) -> None:
    with pytest.raises(clipwise.ConfigurationError, match="several data loaders"):
        trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0)).fit(model(), [DataLoader(data(), BATCH)] * 2)
    strategy = PrivateStrategy(noise_multiplier=1.0, group=range(SIZE), clipping=clipwise.Batch(max_norm=1.0))
    with pytest.raises(clipwise.ConfigurationError, match="group="):
        trainer(tmp_path, strategy).fit(model(), DataLoader(data(), BATCH))


def test_microbatches_are_pieces(tmp_path: Path) -> None:
    strategy = PrivateStrategy(noise_multiplier=1.0, clipping=clipwise.Batch(max_norm=1.0, microbatches=4))
    fit = trainer(tmp_path, strategy)
    fit.fit(model(), DataLoader(data(), BATCH))
    assert fit.global_step == strategy.private.steps == 12


@pytest.mark.parametrize("sanity_steps", [0, 2])
def test_an_evaluation_on_the_training_records_is_refused(tmp_path: Path, sanity_steps: int) -> None:
    rows = data()
    fit = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0), num_sanity_val_steps=sanity_steps)
    with pytest.raises(clipwise.ConfigurationError, match="evaluate on other records"):
        fit.fit(model(), DataLoader(rows, BATCH), DataLoader(rows, 16))
    assert not fit.callback_metrics
    with pytest.raises(clipwise.ConfigurationError, match="evaluate on other records"):
        fit.fit(model(), DataLoader(rows, BATCH), DataLoader(Subset(rows, range(20)), 16))
    fit = trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0))
    fit.fit(model(), DataLoader(rows, BATCH), DataLoader(data(), 16))
    with pytest.raises(clipwise.ConfigurationError, match="evaluate on other records"):
        fit.validate(fit.lightning_module, DataLoader(rows, 16))


def test_a_value_of_the_training_batches_in_the_log_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(clipwise.PrivacyWarning, match="train_loss"):
        trainer(tmp_path, PrivateStrategy(noise_multiplier=1.0)).fit(model("logged"), DataLoader(data(), BATCH))
