"""make_private: validates and resolves the arguments of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping import PerExample, Site, Strategy
from clipwise.deprecation import renamed_arguments
from clipwise.distributed import followers, set_up
from clipwise.distributed.layouts import layout_of
from clipwise.distributed.ranks import ranks_of_process, reporting_set_up
from clipwise.engine import fingerprint, observer
from clipwise.engine.context import parts_of
from clipwise.engine.plan import (
    Draws,
    Plan,
    PrivacyTarget,
    adjacency_of,
    delta_of,
    noise_kind_of,
    planned_steps,
    require_for_a_run,
    require_whole_blocks,
)
from clipwise.engine.private import Private
from clipwise.errors import ConfigurationError, LedgerError
from clipwise.layers.public_statistics import AllPublicStatistics
from clipwise.ledger.durable_files import require_writable
from clipwise.ledger.ledger import FileLedger, Ledger, MemoryLedger, read
from clipwise.ledger.multi_run import Held
from clipwise.ledger.run_description import About
from clipwise.optim.averaging import AveragedParameters, Penalty, require_penalty
from clipwise.privacy import Adjacency, Sampling, Unit, effective_multiplier
from clipwise.sampling.augmentation import MOST_VIEWS, Views
from clipwise.sampling.base import Scheme
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.microbatches import ByUser, microbatches_of
from clipwise.sampling.schemes import DRAWN_BY_MICROBATCHES, Partition, make_scheme
from clipwise.validation import step_inputs
from clipwise.validation.arguments import number, plain, require_bool, require_path, whole
from clipwise.validation.public_overlap import require_apart
from clipwise.validation.training_loop import changed_since_last_run, require_process_group
from clipwise.validation.uncompiled import uncompiled


def _views_name(value: object) -> str:
    """The name of the deprecated argument `averaged_views`."""
    return "augmentation" if isinstance(value, Views) else "augmentation_multiplicity"


@renamed_arguments(averaged="ema", averaged_views=_views_name)
@reporting_set_up
def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    clipping: Strategy | None = None,
    group: Iterable[Hashable] | Tensor | None = None,
    batch_size: int | None = None,
    sample_rate: float | None = None,
    max_batch_size: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    noise: str = "standard",
    max_physical_batch_size: int | None = None,
    augmentation_multiplicity: int = 1,
    augmentation: Views | None = None,
    ema: float | AveragedParameters | None = None,
    penalty: Penalty | None = None,
    seed: int | None = None,
    ledger: str | os.PathLike[str] | Ledger | None = None,
    resume_file: str | os.PathLike[str] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    probe_independence: bool = True,
    loss: Callable[..., Tensor] | None = None,
    rank_timeout: float | None = None,
) -> Private:
    """Make the training of a model private. The model, the optimizer and the data set are not wrapped or replaced.

    If torch.distributed is initialised (`torchrun`), all ranks call it with the same arguments and train one model
    together: a plain one, one in DistributedDataParallel, or one sharded by `fully_shard` or split by
    `parallelize_module`. Rank 0 writes the ledger.

    Args:
        model: any module. It gets no wrapper and no hooks, and keeps its `state_dict` keys.
        optimizer: any torch optimizer over the model's trainable parameters.
        dataset: a map-style data set: a `TensorDataset`, a list of records, a Hugging Face data set. Its length is
            public. Not a `DataLoader` or a `DataFrame`.
        clipping: the strategy that bounds the contribution of one record; `PerExample(max_norm=1.0)` by default.
        group: the user id of each record, for user-level privacy with `Batch`. Users are drawn instead of records,
            `batch_size` counts users, and each user is one microbatch. The number of users is public.
        batch_size: the *expected* number of examples per step (`sample_rate` times the length of the data set).
        sample_rate: the probability that an example is in a batch; instead of `batch_size`.
        max_batch_size: for "truncated-poisson", the largest batch. If more examples are drawn, a random subset of this
            size is kept. The default is so high that truncation costs no privacy.
        epochs: the planned number of passes over the data, which the noise is calibrated for.
        steps: the planned number of steps; instead of `epochs`.
        epsilon: the privacy budget at `delta`. The noise is calibrated so that the planned steps fit the budget; a
            step that would exceed it raises `BudgetExhausted`. It is the budget of the whole ledger: releases of other
            runs in the ledger count as well, by a Renyi filter.
        delta: well below 1 / (number of records). It may be left out with `noise_multiplier`.
        noise_multiplier: noise standard deviation over sensitivity, instead of `epsilon`. 0 is for debugging, and
            gives epsilon = inf.
        sampling: "poisson", "truncated-poisson", "fixed-size", "partition" (for `Batch` without `group` only),
            "shuffled" or "full".
        adjacency: the neighbouring relation. The default depends on the sampling scheme.
        noise: "standard": tail-exact Gaussian noise in floating point. "secure": Gaussian noise rounded exactly to a
            grid, from ChaCha20. It resists attacks on the generator and on the low bits of the released values. It is
            drawn on the CPU and needs clipwise-dp[secure]. See `clipwise.noise.secure`.
        max_physical_batch_size: yield batches in pieces of at most this size: loop over `private.loader.pieces()`. It
            changes no result. The pieces of `Batch` are its microbatches; a limit below their size raises an error.
        augmentation_multiplicity: K: the loader yields each example as K equal, consecutive rows, which the training
            loop may change at random, and `step` takes one loss per row. The gradient of the mean loss of an example is
            clipped, so the sensitivity does not change.
        augmentation: `augment.Views(K, ...)`: the same, with K random views of each example drawn from the run's key.
            (`with private.randomness():` does this for dropout and other random layers.)
        ema: keep an average of the released parameters in `private.ema`: the decay of an exponential moving average,
            such as 0.999, or an `AveragedParameters(model, ...)`. It costs no privacy; checkpoints hold it.
        penalty: a function from the model to a number, such as a norm of its weights. Its gradient is added after the
            noise and is not divided by the batch size. It must not depend on the data.
        seed: for tests and reproduction: noise and samples are the same in every run with this seed. No guarantee is
            claimed for such a run: `spent()` and the statement report the figures that it would have without a seed. By
            default the key comes from the operating system.
        ledger: the path of the ledger file, or a ledger. By default the ledger is in memory.
        resume_file: the file where `close` stores the secrets for resuming; by default beside the ledger.
        collate_fn, num_workers, pin_memory, prefetch_factor: as in `torch.utils.data.DataLoader`.
        probe_independence: test whether a loss depends on other examples' inputs, on the first batches and whenever
            a part of the graph gets its first gradient. The loader then yields marked tensors, which behave as ordinary
            ones: `requires_grad` is False, `numpy()` works.
        loss: a function from a batch of the loader to one loss per row: `loss(*batch)` for a tuple or list,
            `loss(batch)` for a mapping or a tensor. Tensors are moved to the model's device first. It must contain all
            computation between the loader and the losses, such as a normalisation of the inputs, and no side effects.
            Before the first releases it runs some dozens of times on batches with examples replaced, reordered, removed
            and collated again. A loss that depends on other examples raises an error. `private.compiled()` uses it too.
        rank_timeout: on several ranks, the number of seconds after which a rank stops waiting for the others and
            raises `DistributedError`; 600 by default. It must be longer than the slowest step.

    Returns:
        The private run: loop over `.loader` and call `.step(losses)`.
    """
    require_process_group()
    if rank_timeout is not None:
        rank_timeout = number("rank_timeout", rank_timeout, above=0)
    ranks = ranks_of_process(rank_timeout)
    if isinstance(model, nn.Module) and not (isinstance(clipping, Strategy) and clipping.is_coupled):
        model = uncompiled(model)
    layout = layout_of(model, optimizer, ranks)
    model = layout.model
    set_up.require_equal_model(ranks, model)
    parameters = step_inputs.trainable_parameters(model, optimizer)
    layout.bind(parameters)
    set_up.make_weights_equal(layout)
    changed_before = changed_since_last_run(model, optimizer, parameters)
    epsilon, delta, noise_multiplier, sample_rate = plain((epsilon, delta, noise_multiplier, sample_rate))
    epochs, steps, seed = plain((epochs, steps, seed))
    strategy = _strategy(clipping, model, parameters)
    noise = noise_kind_of(noise)
    layout.require_whole_weights("" if penalty is None else "penalty")
    require_penalty(penalty, model)
    require_bool("probe_independence", probe_independence)
    if loss is not None and not callable(loss):
        raise ConfigurationError(
            f"loss must be a function from a batch to one loss per example, not {type(loss).__name__}."
        )
    fetcher = Fetcher(dataset, collate_fn)
    records = fetcher.dataset_size
    users = None if group is None else _users(group, strategy)
    scheme = make_scheme(
        sampling,
        records if users is None else users.units(records),
        batch_size,
        sample_rate,
        max_batch_size=max_batch_size,
        microbatches=strategy.microbatches if isinstance(sampling, str) and sampling in DRAWN_BY_MICROBATCHES else 1,
    )
    draws = _draws(scheme, adjacency, strategy, users)
    if strategy.clips_whole_blocks and max_physical_batch_size is not None:
        _require_whole_microbatches(max_physical_batch_size, strategy, draws, records)
    require_whole_blocks(scheme.sampling, strategy, draws.unit)
    planned = planned_steps(epochs, steps, scheme)
    delta = delta_of(delta, epsilon, scheme.dataset_size)
    target = PrivacyTarget(epsilon, delta, planned, noise_multiplier)
    if observer.current() is not None:  # an audited run keeps no files
        ledger = resume_file = None
    held = ranks.from_rank_0(lambda: _held(ledger))
    z = ranks.from_rank_0(lambda: target.multiplier(draws.event(1.0), held))
    set_up.require_equal_data(ranks, dataset)
    statistics = AllPublicStatistics(model)
    for reader in (strategy.needs_whole_weights, "PublicBatchNorm" if statistics else ""):
        layout.require_whole_weights(reader)
    statistics.require_complete()
    require_apart(dataset, strategy, statistics)
    statistics.require_correctable(parameters)
    statistics.refresh()  # a strategy may measure the model
    layout.require_strategy(strategy, plain(max_physical_batch_size), loss is not None)
    joined = layout.joined_squares if layout.splits_gradients else None
    site = Site(model, layout.used, draws.adjacency, draws.unit, scheme, fetcher.empty, joined)
    with layout.whole_weights():
        clipper = strategy.attach(site)
    parts = parts_of(clipper, parameters, z, strategy.split, noise)
    views = _views(augmentation_multiplicity, augmentation, strategy)
    # Rounding in the split must not make the event better than the noise that is drawn.
    event = draws.event(min(z, effective_multiplier(parts)))
    held.require_fitting(event, epsilon, delta)
    held.require_planned(event, planned, epsilon, delta)
    given = (epsilon, delta, noise_multiplier, noise, planned, seed, type(optimizer))
    set_up.require_equal_arguments(ranks, strategy.describe(), event, parts, *given)
    if not ranks.is_first:
        resume_file = None
    if resume_file is not None:
        require_path("resume_file", resume_file)
        require_writable("resume_file", Path(resume_file))
    header = {"dataset_size": scheme.dataset_size, "parameters": fingerprint.of_parameters(parameters)}
    opened = followers.opened(ranks, ledger, lambda: _ledger(ledger, header))
    if resume_file is None and isinstance(opened, FileLedger):
        resume_file = opened.path.with_name(opened.path.name + ".resume")
    try:
        return Private(
            Plan(
                model=model,
                optimizer=optimizer,
                parameters=parameters,
                dataset=dataset,
                scheme=scheme,
                strategy=strategy,
                clipper=clipper,
                parts=parts,
                event=event,
                noise=noise,
                budget=target.budget,
                delta=delta,
                planned=planned,
                multiplier=z,
                ledger=opened,
                resume_file=None if resume_file is None else Path(resume_file),
                seed=seed,
                cut=draws.cut,
                public_statistics=statistics or None,
                views=views,
                averages=_averages(ema, model),
                penalty=penalty,
                loader_options={
                    "max_physical_batch_size": max_physical_batch_size,
                    "num_workers": num_workers,
                    "pin_memory": pin_memory,
                    "prefetch_factor": prefetch_factor,
                },
                collate_fn=collate_fn,
                probe=probe_independence and not (strategy.is_coupled or layout.splits_gradients),
                changed_before=changed_before,
                loss=loss,
                ranks=ranks,
                layout=layout,
            )
        )
    except BaseException:
        if not isinstance(ledger, Ledger):
            opened.close()
        raise


def _strategy(clipping: Strategy | None, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Strategy:
    strategy = PerExample() if clipping is None else clipping
    if not isinstance(strategy, Strategy):
        raise ConfigurationError("clipping must be a strategy such as clipwise.PerExample(max_norm=1.0).")
    if not strategy.takes_complex:
        step_inputs.require_real(parameters, type(strategy).__name__)
    if not strategy.allows_batch_norm:
        step_inputs.require_no_batch_statistics(model, strategy.is_coupled)
    return strategy


def _draws(scheme: Scheme, adjacency: str | Adjacency | None, strategy: Strategy, users: ByUser | None) -> Draws:
    relation = adjacency_of(adjacency, scheme.sampling)
    require_for_a_run(relation, scheme.sampling)
    if users is not None:
        return Draws(scheme, relation, Unit.USER, users)
    cut = microbatches_of(scheme, strategy.microbatches) if strategy.clips_whole_blocks else None
    return Draws(scheme, relation, strategy.unit, cut)


def _views(multiplicity: object, augmentation: Views | None, strategy: Strategy) -> Views | None:
    count = whole("augmentation_multiplicity", multiplicity, least=1, most=MOST_VIEWS)
    if augmentation is None:
        if count == 1:
            return None
        augmentation = Views(count)
    elif not isinstance(augmentation, Views):
        raise ConfigurationError(
            f"augmentation must be clipwise.augment.Views(K, ...), not {type(augmentation).__name__}. "
            "augmentation_multiplicity=K repeats each row K times."
        )
    elif count != 1:
        raise ConfigurationError("Give augmentation or augmentation_multiplicity, not both: Views(K, ...) holds K.")
    strategy.require_views()
    return augmentation


def _averages(ema: float | AveragedParameters | None, model: nn.Module) -> AveragedParameters | None:
    if ema is None or isinstance(ema, AveragedParameters):
        return ema
    return AveragedParameters(model, number("ema", ema, least=0, below=1))


def _users(group: Any, strategy: Strategy) -> ByUser:
    """The records of each user. Raises if the strategy does not bound the contribution of a user."""
    if not strategy.protects_users:
        raise ConfigurationError(
            f"group= protects users with all their records, and {type(strategy).__name__} bounds the contribution of "
            "a single record: a user with many records would not be protected. Use Batch(max_norm=...), which clips "
            "the mean gradient of each user."
        )
    if strategy.microbatches != 1:
        raise ConfigurationError(
            f"microbatches={strategy.microbatches} with group=: the records of each user are one microbatch, and "
            "batch_size is the expected number of users per step. Leave microbatches out."
        )
    return ByUser(group)


def _require_whole_microbatches(limit: int, strategy: Strategy, draws: Draws, records: int) -> None:
    """Microbatches are the pieces that the loader yields: raise for a limit below their expected size."""
    scheme, size = draws.scheme, draws.scheme.expected_size / strategy.microbatches
    advice = " and use Batch(..., microbatches=k) with a larger k: the loader yields one microbatch at a time."
    if isinstance(draws.cut, ByUser):
        size = records / draws.cut.users
        advice = ". With group= the records of each user are one microbatch, which the loader yields as one piece."
    elif isinstance(scheme, Partition):
        size = scheme.microbatch_size
    if whole("max_physical_batch_size", limit, least=1) < size:
        raise ConfigurationError(
            f"max_physical_batch_size would cut microbatches, and {type(strategy).__name__} clips each as a whole: "
            f"leave it out{advice}"
        )


def _held(ledger: str | os.PathLike[str] | Ledger | None) -> Held:
    """The contents of the ledger. One that cannot be read raises later, when it is opened."""
    if isinstance(ledger, Ledger):
        continues = isinstance(ledger, FileLedger) and ledger.existing
        history, about, plan = ledger.history(), ledger.about, ledger.plan
    else:
        continues, history, about, plan = True, [], (), None
        with contextlib.suppress(LedgerError, TypeError, ValueError):
            if ledger is not None and Path(ledger).is_file():
                found = read(ledger)
                history, about, plan = found.history, found.about, found.plan
    return Held(tuple(history), tuple(About.from_dict(entry) for entry in about), plan, continues)


def _ledger(ledger: str | os.PathLike[str] | Ledger | None, header: Mapping[str, Any]) -> Ledger:
    if ledger is None:
        return MemoryLedger()
    if isinstance(ledger, Ledger):
        return ledger
    require_path("ledger", ledger)
    try:
        Path(ledger).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(f"{ledger} cannot be written as a ledger: {error.strerror}.") from error
    return FileLedger(ledger, header=header)
