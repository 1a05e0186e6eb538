"""The privacy statement of a run: guarantee, setting, unit, adjacency, mechanism, accounting, assumptions, software.

docs/guides/statement.md explains every field.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clipwise.clipping.base import StatementText, recorded_strategy
from clipwise.deprecation import renamed_fields
from clipwise.engine.plan import delta_of
from clipwise.errors import LedgerError
from clipwise.ledger import ledger, multi_run
from clipwise.ledger.run_description import About, plain, versions
from clipwise.privacy import Entry, Event, Spent, Unit, rounded_up
from clipwise.report import wording
from clipwise.report.risk import Risk
from clipwise.validation.arguments import number

FORMAT = 1
NOT_RECORDED = "not recorded (the ledger was written by an older version)"


@renamed_fields(sittings="processes")
@dataclass(frozen=True)
class Statement:
    """A privacy statement, as text (`str`) or as JSON (`to_dict`).

    Args:
        run: the id of the run.
        spent: the figures of the guarantee.
        history: all releases.
        risk: bounds on attacks.
        processes: the configuration of each process of the run, in order; the last one is in force.
        dataset_size: the number of units, which is public; None if not recorded.
        declared: (kind, reason) of each change of the weights that the user declared.
        weights: whether the weights of the model are verified.
        exact: whether the number of releases is exact. The ledger of a run that continues, or that did not end
            cleanly, counts all releases that may have happened.
        if_fixed: the PLD epsilon if several runs share the ledger; it assumes that all of them were fixed before the
            first release. None for a single run.
    """

    run: str
    spent: Spent
    history: tuple[Entry, ...]
    risk: Risk
    processes: tuple[About, ...]
    dataset_size: int | None = None
    declared: tuple[tuple[str, str], ...] = ()
    weights: str = wording.NOT_CLOSED
    exact: bool = True
    if_fixed: float | None = None

    @property
    def about(self) -> About:
        """The configuration of the latest process."""
        return self.processes[-1] if self.processes else About()

    @property
    def _trained(self) -> list[About]:
        """The processes that trained, without those that only prepared data or evaluated a model."""
        return [process for process in self.processes if process.event is None]

    @property
    def _is_training(self) -> bool:
        """Whether any release is a step of a training."""
        return not self.history or any(not entry.event.purpose for entry in self.history)

    def _combined(self, field: str, decisive: object) -> Any:
        """A field over all processes: `decisive` if any process has it, else None if any did not record it."""
        values = [getattr(process, field) for process in self.processes]
        return decisive if decisive in values else None if None in values or not values else values[-1]

    @property
    def seeded(self) -> bool | None:
        """Whether any process used a user-given seed for noise and sampling; None if not recorded."""
        found: bool | None = self._combined("seeded", True)
        return found

    @property
    def draws(self) -> str | None:
        """The weakest source of randomness of random layers: "seeded" by the user, the run's "key", or None (torch)."""
        sources = {process.draws for process in self._trained}
        return "seeded" if "seeded" in sources else "key" if sources == {"key"} else None

    @property
    def probed(self) -> bool | None:
        """Whether every process was probed for coupled losses; None if not recorded."""
        values = [process.probed for process in self._trained] or [None]
        return False if False in values else None if None in values else True

    @property
    def planned_tests(self) -> tuple[str, ...] | None:
        """The tests of the loss that were planned in every process of the run; None if not recorded."""
        planned = [process.planned_tests for process in self._trained]
        if () in planned:
            return ()
        if not planned or None in planned:
            return None
        return tuple(name for name in planned[0] or () if all(name in (tests or ()) for tests in planned))

    @property
    def noise(self) -> str | None:
        """The weakest kind of noise of any process; None if not recorded."""
        found: str | None = self._combined("noise", "standard")
        return found

    @property
    def is_shared(self) -> bool:
        """Whether several runs have releases in the ledger."""
        return multi_run.is_shared(self.history)

    @property
    def budget(self) -> float | None:
        """The epsilon that no run could exceed; None if a run in the ledger has no budget."""
        if not self.is_shared:
            return self.about.budget
        latest = {process.run: process.budget for process in self.processes}
        found = [latest.get(entry.run) for entry in self.history]
        return None if None in found else max(budget for budget in found if budget is not None)

    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of the guarantee."""
        several = "; a person with several records has weaker protection" if self.spent.unit is Unit.RECORD else ""
        owned = f"one item of the data set is one {self.spent.unit}{several}"
        text = self._text()
        found = [
            wording.OWNED if self.spent.unit is Unit.USER else owned,
            wording.KEY_IS_GIVEN if self.seeded else wording.KEY_IS_SECRET,
        ]
        if self._is_training:
            independent = f"{wording.INDEPENDENT}: {wording.PROBED[self.probed]}; {wording.planned(self.planned_tests)}"
            found = [text.separate or independent, *found, wording.RANDOM_LAYERS[self.draws]]
        found += text.assumptions
        if (kind := self.noise) is not None:
            found.append(wording.PSEUDO_RANDOM.get(kind, kind))
        if any(process.followed_metric for process in self.processes):
            found.append(wording.FOLLOWED_METRIC)
        if any(process.penalised for process in self.processes):
            found.append(wording.PENALISED)
        found += wording.declared(self.declared)
        if self.is_shared:
            found.append(wording.FIXED_RUNS)
        elif any(entry.event.purpose == "preparation" for entry in self.history):
            found.append(wording.PLANNED)
        elif len(self._releases()) > 1:
            found.append("the number of steps of each kind was not chosen by looking at released values")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The statement in JSON types; values that are infinite or not recorded are None."""
        s, about, text = self.spent, self.about, self._text()
        figures = {"epsilon": s.epsilon, "delta": s.delta}
        content = {
            "format": FORMAT,
            "run": self.run,
            "guarantee": None if self.seeded else figures,
            "figures_with_a_fresh_key": figures if self.seeded else None,
            "count_is_exact": self.exact,
            "definition": wording.DEFINITION,
            "setting": wording.SETTING,
            "released": self._released(),
            "spent": {k: v if isinstance(v, (int, float)) else str(v) for k, v in asdict(s).items()},
            "epsilon_if_runs_were_fixed": self.if_fixed,
            "neighbours": wording.neighbours(s.adjacency, s.unit),
            "dataset_size": self.dataset_size,
            "history": [
                {"event": e.event.to_dict(), "count": e.count, **({"run": e.run} if self.is_shared else {})}
                for e in self.history
            ],
            "attacker": self.risk.to_dict(),
            "weights": self.weights,
            "declared_updates": [{"kind": kind, "reason": reason} for kind, reason in self.declared],
            "parts": None if about.parts is None else [asdict(p) for p in about.parts],
            "expected_batch_size": about.divisor,
            "strategy": about.strategy,
            "arithmetic": about.arithmetic,
            "noise": self.noise,
            "budget": self.budget,
            "seeded": self.seeded,
            "independence_probed": self.probed,
            "planned_tests": None if text.separate else self.planned_tests,
            "tuning": self._tuning(),
            "public_data": wording.public_data(text.public_data, about.public_statistics),
            "assumptions": self.assumptions(),
            "not_covered": wording.not_covered(s.unit, self.noise),
            "versions": {"run": self.software(), "statement": versions()},
        }
        result: dict[str, Any] = plain(content)
        return result

    def __str__(self) -> str:
        return "\n".join(["Privacy statement", *wording.labelled(self.lines())])

    def lines(self) -> list[tuple[str, str]]:
        """The statement in words: pairs (label, text)."""
        s, divisor = self.spent, self.about.divisor
        size = "" if self.dataset_size is None else f" (data set: {self.dataset_size} {s.unit}s)"
        figures = f"({rounded_up(s.epsilon)}, {s.delta:g})-differential privacy for every released model"
        if self.seeded:
            figures = f"{wording.NO_GUARANTEE}; {wording.WITH_A_FRESH_KEY} {figures}"
        lines = [
            ("guarantee", figures),
            ("setting", wording.SETTING),
            ("released", self._released()),
            ("weights", self.weights),
            ("unit", f"one {s.unit}{size}"),
            ("neighbours", f"{s.adjacency}: {wording.neighbours(s.adjacency, s.unit)}"),
            *(("releases", self._step(e, count)) for e, count in self._releases().items()),
            *([] if self.history else [("releases", "none")]),
            ("sensitivity", self._sensitivity()),
            ("noise", self._noise()),
            ("divisor", NOT_RECORDED if divisor is None else f"{divisor:g} (a public constant)"),
            *(("accountant", text) for text in self._accountants()),
            *self._budget(),
            ("attacker", self._attacker()),
            ("tuning", self._tuning()),
            ("public data", wording.public_data(self._text().public_data, self.about.public_statistics)),
            *(("assumption", text) for text in self.assumptions()),
            *(("not covered", text) for text in wording.not_covered(s.unit, self.noise)),
            *(("software", wording.listed(found)) for found in self.software()),
            ("read with", wording.listed(versions())),
        ]
        if not self._is_training:
            lines = [line for line in lines if line[0] not in ("weights", "sensitivity", "divisor", "public data")]
        if not self.exact:
            state = "the run is in progress, did not end cleanly, or had a failed step"
            lines.insert(1, ("state", f"{state}: every release that may have happened is counted"))
        return lines

    def _tuning(self) -> str:
        runs = len({entry.run for entry in self.history})
        return wording.TUNING.format(these=f"{runs} runs" if runs > 1 else "one run")

    def _text(self, unit: Unit | None = None) -> StatementText:
        recorded = self.about.strategy or {}
        return recorded_strategy(recorded).statement_text(recorded, unit or self.spent.unit)

    def _released(self) -> str:
        if not self._is_training:
            return "; ".join(dict.fromkeys(wording.PURPOSE[entry.event.purpose] for entry in self.history))
        beside = self._text().released
        return f"{wording.RELEASED}; {beside}" if beside else wording.RELEASED

    def _releases(self) -> dict[Event, int]:
        """The number of steps of each kind; several kinds if runs share the ledger or changed settings."""
        counts: dict[Event, int] = {}
        for entry in self.history:
            counts[entry.event] = counts.get(entry.event, 0) + entry.count
        return counts

    def _step(self, e: Event, count: int) -> str:
        if e.purpose:
            return wording.besides_training(e, count)
        what = self._text(e.unit).sum + wording.beside(self.about.parts or ())
        return (
            f"{count} steps, {e.sampling} sampling at rate {e.sample_rate:.6g} ({wording.drawn(e.sampling, e.unit)}). "
            f"Each step is a Gaussian mechanism on {what} with noise multiplier {e.noise_multiplier:.4g}"
        )

    def _sensitivity(self) -> str:
        parts = self.about.parts
        if parts is None:
            return NOT_RECORDED
        text = ", ".join(f"{p.name}: {p.sensitivity:g}" for p in parts[:4])
        text += f" and {len(parts) - 4} more parts" if len(parts) > 4 else ""
        text += wording.what_moves(parts, self.spent.unit)
        if wording.counts(parts):
            text += " (of the next step: max_norm adapts to the released counts, and the noise is scaled with it)"
        else:
            text += self._text().changing
        return text

    def _noise(self) -> str:
        kinds = dict.fromkeys(process.noise for process in self.processes)
        text = "; then ".join(NOT_RECORDED if k is None else wording.NOISE.get(k, k) for k in kinds)
        grids = [p.grid for p in self.about.parts or () if p.grid]
        if grids:
            finest, coarsest = (round(math.log2(g)) for g in (min(grids), max(grids)))
            step = f"2^{finest}" + (f" to 2^{coarsest}" if coarsest > finest else "")
            text += f" (grid step {step}; the sensitivities include the rounding)"
        return text or NOT_RECORDED

    def _accountants(self) -> list[str]:
        """The accountants, and the assumption under which each figure holds for runs that share a ledger."""
        found = [
            f"{self.spent.accountant} (an upper bound on epsilon) over all steps; all parts of a step are one mechanism"
        ]
        if not self.is_shared:
            return found
        runs = len({entry.run for entry in self.history})
        found.append(
            f"{runs} runs share this ledger. The Renyi filter is valid even if a run was configured after seeing "
            "releases of other runs; its order depends only on the first plan in the ledger"
        )
        if self.if_fixed is not None:
            found.append(f"pld: epsilon {rounded_up(self.if_fixed)} {multi_run.IF_FIXED}")
        return found

    def _budget(self) -> list[tuple[str, str]]:
        if self.budget is not None:
            scope = " for all runs together" if self.is_shared else ""
            return [("budget", f"epsilon {self.budget:g}{scope}; a step that would exceed it is refused")]
        if self.is_shared and any(process.budget is not None for process in self.processes):
            return [("budget", "none for the ledger as a whole: some of its runs have no budget")]
        return []

    def _attacker(self) -> str:
        found = ", ".join(f"{wording.percent(power)} at {100 * rate:g}%" for rate, power in self.risk.power)
        claim = f"{wording.WITH_A_FRESH_KEY} this bound: " if self.seeded else ""
        return (
            f"{claim}an attacker that knows all other {self.spent.unit}s has a true-positive rate of at most {found} "
            f"false-positive rate; membership advantage at most {wording.percent(self.risk.advantage)}"
        )

    def software(self) -> list[Mapping[str, Any]]:
        """The distinct software versions of the run, in order."""
        return wording.distinct(process.versions for process in self.processes)


def of_releases(
    history: Sequence[Entry], event: Event, delta: float, plan: Mapping[str, Any] | None = None, **facts: Any
) -> Statement:
    """The statement for a history of releases: by PLD for a single run, and by the Renyi filter for several.

    Args:
        history: all releases.
        event: the kind of step to name if there are no releases.
        delta: the delta of the guarantee.
        plan: the plan of the first run, for the filter.
        facts: the other arguments of `Statement`.
    """
    event = history[-1].event if history else event
    accountant = multi_run.accountant_of(history)
    delta = number("delta", delta, above=0, below=1)
    spent = Spent(
        epsilon=multi_run.epsilon_of(history, delta, accountant, plan),
        delta=delta,
        adjacency=event.adjacency,
        unit=event.unit,
        sampling=event.sampling,
        steps=sum(entry.count for entry in history),
        accountant=accountant,
        reproducible=any(process.seeded is True for process in facts.get("processes", ())),
        assumption=multi_run.assumption_of(history, accountant),
    )
    if multi_run.is_shared(history):
        facts["if_fixed"] = multi_run.epsilon_of(history, delta, "pld")
    return Statement(spent=spent, history=tuple(history), risk=Risk.of(history), **facts)


def of_ledger(path: str | os.PathLike[str], delta: float | None = None) -> Statement:
    """The statement for a ledger file, which is only read.

    Args:
        path: the file.
        delta: by default the delta of the run, or a value well below 1 / (size of the data set).
    """
    found = ledger.read(path)
    if not found.history:
        raise LedgerError(f"{path} holds no release: there is no statement to make.")
    processes = tuple(About.from_dict(about) for about in found.about)
    size = found.header.get("dataset_size")
    size = size if isinstance(size, int) else None
    if delta is None:
        delta = processes[-1].delta if processes else None
    if delta is None:
        delta = delta_of(None, None, size or 1)
    return of_releases(
        found.history,
        found.history[-1].event,
        delta,
        plan=found.plan,
        run=found.run,
        processes=processes,
        dataset_size=size,
        exact=found.exact,
        declared=found.declared,
        weights={True: wording.CLOSED, False: wording.NOT_VERIFIED, None: wording.NOT_CLOSED}[found.verified],
    )
