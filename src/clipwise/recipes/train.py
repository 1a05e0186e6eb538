"""The orchestration of `clipwise train`: prepare, train, evaluate.

    plan      every setting, before the first release
    prepare   noised counts of the training rows, if something is not declared; the encoding is then fixed
    train     the planned steps, with one ledger for counts and steps
    evaluate  one release on the held-out rows, or an exact figure on public rows

A run can be interrupted after any of them. What was released is in its folder before the next stage begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from clipwise.clipping import PerExample
from clipwise.engine import checkpoint
from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
from clipwise.errors import ClipwiseError, ConfigurationError, LedgerError
from clipwise.ledger.ledger import FileLedger, read
from clipwise.ledger.planned_run import plan_run
from clipwise.ledger.run_description import versions
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Event
from clipwise.recipes.building import batch_loss, device_of, make_optimizer
from clipwise.recipes.config import RECORDED, Choices, read_choices
from clipwise.recipes.counts import NoisedCounts
from clipwise.recipes.interrupts import Interrupts
from clipwise.recipes.kind import Encoder, Settings
from clipwise.recipes.planning import RunPlan, plan_of
from clipwise.recipes.run_folder import RunFolder
from clipwise.recipes.sources import encoder_from, open_source
from clipwise.recipes.without_privacy import train_plainly

# Rows that the loader yields at a time; it changes no result.
PHYSICAL_BATCH = 1024
# The most lines about progress in metrics.jsonl, each of which has a figure of the PLD accountant.
PROGRESS_LINES = 20


@dataclass(frozen=True)
class Moment:
    """Progress that may be shown: all of it is public. `epsilon` is the latest figure that was computed.

    `left` is the time left at the pace since the first step, which is slower than the others.
    """

    step: int
    steps: int
    epoch: float
    epochs: float
    epsilon: float | None
    seconds: int
    left: float | None


Watch = Callable[[Moment], None]


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data are prepared: everything that the training needs."""

    plan: RunPlan
    folder: RunFolder
    encoder: Encoder

    @property
    def settings(self) -> Settings:
        """The settings of the training."""
        return self.plan.settings

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        return device_of(self.plan.choices)


def begin(plan: RunPlan, folder: RunFolder, command: str) -> PreparedRun:
    """Plan the run in its ledger, release noised counts if the preparation needs them, and fix the encoding."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    content = _config(plan, {"name": folder.path.name, "command": command, "created": created})
    folder.write_config(content)
    try:
        encoder = _prepared(plan, folder).for_model(plan.settings.model)
        plan.source.require_readable(plan.held_out_rows)  # before the training, not after it
    except ConfigurationError as error:
        raise _with_cost(error, folder) from error
    content["encoding"] = {"kind": encoder.kind, **encoder.to_dict()}
    content["data"]["preprocessing"] = list(encoder.preprocessing)
    folder.write_config(content)  # before the training: what was released is not released again
    return PreparedRun(plan, folder, encoder)


def reopened(folder: RunFolder, **changes: Any) -> PreparedRun:
    """A run that was interrupted. Its settings and its encoding come from its folder; the data are opened again."""
    content = folder.read_config()
    choices = replace(Choices(**read_choices(folder.config)), **changes)
    if choices.is_private and not folder.ledger.is_file():
        raise ConfigurationError(
            f"{folder.path} has no {folder.ledger.name}, so what its releases cost is not known: restore the file, or "
            "begin a new run."
        )
    if "encoding" not in content:
        raise ConfigurationError(
            f"{folder.path} has no encoding of its data: it was interrupted while the data were prepared. What its "
            "ledger holds is spent. Begin a new run, whose cost adds to it."
        )
    source = open_source(choices)
    if len(source) != content["data"]["rows"]:
        raise ConfigurationError(
            f"The data have {len(source)} rows, and {folder.path} was begun with {content['data']['rows']}: a run "
            "continues with the data that it was begun with."
        )
    plan = plan_of(choices, source)
    _require_recorded(plan, content, folder)
    return PreparedRun(plan, folder, encoder_from(content["encoding"]))


def train(run: PreparedRun, watch: Watch, stop: Interrupts) -> bool:
    """Train, or continue to train. Returns False if it was interrupted; it can then be resumed."""
    with _initial_weights(run.plan.choices.seed):
        model = run.encoder.model(run.settings.model).to(run.device)
        try:
            if run.plan.event is None:
                after = _Reporter(run, watch).after
                is_complete = train_plainly(run.plan, run.encoder, model, after, stop)
            else:
                is_complete = _train_privately(run, model, _Reporter(run, watch), stop)
        except ClipwiseError as error:
            if run.folder.checkpoint.is_file():  # it can be resumed
                raise
            raise _with_cost(error, run.folder) from error
    if is_complete:
        run.folder.save_model(model.state_dict())
        run.folder.secrets.unlink(missing_ok=True)  # the budget is spent: the run will not be resumed
    return is_complete


def private_run(run: PreparedRun, model: nn.Module, ledger: FileLedger) -> Private:
    """The private training of a prepared run."""
    plan, settings = run.plan, run.settings
    data = run.encoder.encode(plan.source, plan.training_rows)
    return make_private(
        model,
        make_optimizer(model, settings),
        data,
        clipping=PerExample(max_norm=settings.max_norm),
        batch_size=settings.batch_size,
        steps=plan.steps,
        epsilon=plan.epsilon,
        delta=plan.delta,
        ledger=ledger,
        seed=plan.choices.seed,
        max_physical_batch_size=max(1, PHYSICAL_BATCH // settings.views),
        augmentation=run.encoder.views(settings.views),
        ema=settings.ema,
        loss=batch_loss(run.encoder, model),
    )


def _prepared(plan: RunPlan, folder: RunFolder) -> Encoder:
    if plan.event is None:
        # Without privacy the preparation uses the same counts, without noise.
        counts = NoisedCounts(0.0, lambda _: None, delta=0.5) if plan.source.needs_counts() else None
        return plan.source.prepare(plan.training_rows, counts)
    seed = plan.choices.seed
    key = NoiseKey.fresh() if seed is None else NoiseKey.from_seed(seed, b"preparation")
    with FileLedger(folder.ledger, header={"dataset_size": len(plan.training_rows)}) as ledger:
        epsilon, is_seeded = plan.epsilon, seed is not None
        tag = plan_run(ledger, plan.event, plan.steps, epsilon, plan.delta, seeded=is_seeded, key=key.id)
        if plan.counts is None:
            return plan.source.prepare(plan.training_rows, None)
        planned = plan.counts

        def charge(event: Event) -> None:
            if event.noise_multiplier < planned.noise_multiplier or event.excess > planned.excess:
                raise ConfigurationError("The preparation of the data would release more than was planned for it.")
            ledger.charge(replace(event, purpose="preparation"), tag)

        counts = NoisedCounts(planned.noise_multiplier, charge, delta=planned.excess, key=key)
        return plan.source.prepare(plan.training_rows, counts)


def _with_cost(error: ClipwiseError, folder: RunFolder) -> ClipwiseError:
    """The error of a run that cannot be trained. The folder of a run without a release is removed."""
    if folder.ledger.is_file() and read(folder.ledger).position:
        return ConfigurationError(
            f"{error} Something may have been released before: its cost is in {folder.ledger}, and adds to that of "
            "another run on these rows."
        )
    folder.discard()
    return error


def _require_recorded(plan: RunPlan, content: Mapping[str, Any], folder: RunFolder) -> None:
    """Raise if the settings in config.toml do not give the figures that were recorded with them."""
    for section, table in _config(plan, {}).items():
        for key in RECORDED.get(section, ()):
            if key in table and content.get(section, {}).get(key) != table[key]:
                raise ConfigurationError(
                    f"[{section}] {key} in {folder.config} does not belong to the other settings there, so the file "
                    "has changed since the run began: restore it, or begin a new run."
                )


def _train_privately(run: PreparedRun, model: nn.Module, reporter: _Reporter, stop: Interrupts) -> bool:
    folder, steps = run.folder, run.plan.steps
    with private_run(run, model, FileLedger(folder.ledger)) as private:
        before = 0 if run.plan.counts is None else 1  # releases that were no steps
        if private.steps > before:
            _load(folder, model, private)
        loss, made = batch_loss(run.encoder, model), private.steps - before
        pieces = chain.from_iterable(repeat(private.loader.pieces()))
        model.train()
        while made < steps:
            batch = [value.to(run.device) for value in next(pieces)]
            with private.randomness():
                losses = loss(*batch) if len(batch[-1]) else None
            if private.step(losses):
                made += 1
                if reporter.after(made, private) and made < steps:
                    _save(folder, model, private)
                if stop.requested:
                    break
        _save(folder, model, private)
        if made >= steps and run.settings.ema is not None:
            private.ema.copy_to(model)
    return made >= steps


def _save(folder: RunFolder, model: nn.Module, private: Private) -> None:
    checkpoint.save(folder.checkpoint, {"private": private.state_dict(), "model": model.state_dict()})


def _load(folder: RunFolder, model: nn.Module, private: Private) -> None:
    if not folder.checkpoint.is_file():
        raise LedgerError(
            f"{folder.path} was interrupted before its first checkpoint, and its releases are spent: begin a new run, "
            "whose cost adds to that of this one."
        )
    state = checkpoint.load(folder.checkpoint)
    model.load_state_dict(state["model"])
    private.load_state_dict(state["private"])


class _Reporter:
    """Reports progress to the watcher, and at most 20 times to metrics.jsonl, with the epsilon spent."""

    def __init__(self, run: PreparedRun, watch: Watch) -> None:
        self._run, self._watch = run, watch
        self._epsilon: float | None = None
        self._begun = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step of this process, and when it ended
        self._per_epoch = max(1.0, run.plan.steps / run.settings.epochs)
        epochs = max(1, round(run.settings.epochs / PROGRESS_LINES))
        self._every = max(1, round(epochs * self._per_epoch))

    def after(self, step: int, private: Private | None = None) -> bool:
        """After a step. Returns whether a line about the progress was written."""
        # Whole seconds: the time of a step depends on its realised batch size.
        steps, seconds = self._run.plan.steps, round(time.monotonic() - self._begun)
        is_line = step % self._every == 0 or step == steps
        epoch = step / self._per_epoch
        if is_line:
            accountant = None
            if private is not None:
                spent = private.spent()
                self._epsilon, accountant = spent.epsilon, spent.accountant
            self._run.folder.record(
                "progress",
                epoch=round(epoch, 3),
                step=step,
                steps=steps,
                epsilon=self._epsilon,
                accountant=accountant,
                seconds=seconds,
            )
        if self._first is None:
            self._first = step, time.monotonic()
        done, pace = step - self._first[0], time.monotonic() - self._first[1]
        left = pace / done * (steps - step) if done else None
        self._watch(Moment(step, steps, epoch, self._run.settings.epochs, self._epsilon, seconds, left))
        return is_line


@contextmanager
def _initial_weights(seed: int | None) -> Iterator[None]:
    """Draw initial weights from the operating system's randomness, unless there is a seed."""
    with torch.random.fork_rng():
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
        yield


def _config(plan: RunPlan, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The content of config.toml before the data are prepared."""
    content = plan.choices.sections()
    training = asdict(plan.settings)
    share = training.pop("counts_share")
    content["run"] = about | content["run"]
    content["data"] |= {"kind": plan.source.kind, "rows": len(plan.source), "description": plan.source.description}
    content["privacy"] |= {"delta": plan.delta, "adjacency": "zero-out", "unit": "record"}
    content["training"] |= {**training, "steps": plan.steps}
    content["evaluation"] |= {"rows": len(plan.held_out_rows)}
    if plan.counts is not None:
        content["privacy"]["counts_share"] = share
        content["training"]["counts_noise_multiplier"] = plan.counts.noise_multiplier
    if plan.event is not None:
        content["training"]["noise_multiplier"] = plan.event.noise_multiplier
    if plan.evaluation is not None:
        content["evaluation"]["noise_multiplier"] = plan.evaluation.noise_multiplier
        content["evaluation"]["released"] = "noised figures"
    content["versions"] = versions()
    return content
