"""The privacy statement of a run: what is promised, to whom, on what grounds, and what is not promised.

It covers what the field asks of a report: the setting, the unit and the neighbours, which data accesses and
which outputs are covered, how it was accounted and under which assumptions, the figures, and the software.
docs/guides/statement.md explains every field.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clipwise.clipping.base import StatementText, recorded_strategy
from clipwise.engine.plan import delta_of
from clipwise.errors import LedgerError
from clipwise.ledger import ledger, multi_run
from clipwise.privacy import Entry, Event, Spent, Unit, rounded_up
from clipwise.report import wording
from clipwise.report.risk import Risk
from clipwise.report.run_description import About, plain, versions
from clipwise.validation.arguments import number

FORMAT = 1
NOT_RECORDED = "not recorded (the ledger was written by an older version)"


@dataclass(frozen=True)
class Statement:
    """A privacy statement, for people (`str`) and for machines (`to_dict`).

    Args:
        run: the id of the run.
        spent: the figures of the guarantee.
        history: all releases.
        risk: what they mean for an attacker.
        sittings: what the run said about itself each time it began or went on; the last one is in force.
        dataset_size: the number of units, which is public; None if not recorded.
        declared: kind and reason of changes of the weights that the user declared.
        weights: what is known of the model's weights.
        exact: whether just what was released is counted. If a run goes on, or did not end cleanly, its ledger
            counts all that it may have released.
        if_fixed: epsilon by PLD where several runs share the ledger: it holds if all of them were fixed before the
            first release. None for a single run.
    """

    run: str
    spent: Spent
    history: tuple[Entry, ...]
    risk: Risk
    sittings: tuple[About, ...]
    dataset_size: int | None = None
    declared: tuple[tuple[str, str], ...] = ()
    weights: str = wording.NOT_CLOSED
    exact: bool = True
    if_fixed: float | None = None

    @property
    def about(self) -> About:
        """What the latest sitting said about itself."""
        return self.sittings[-1] if self.sittings else About()

    def _told(self, field: str, decisive: object) -> Any:
        """A field of all sittings: the decisive value if any has it, and None if one did not record it."""
        told = [getattr(sitting, field) for sitting in self.sittings]
        return decisive if decisive in told else None if None in told or not told else told[-1]

    @property
    def seeded(self) -> bool | None:
        """Whether any sitting took noise and sampling from a given seed; None if that is not recorded."""
        found: bool | None = self._told("seeded", True)
        return found

    @property
    def draws(self) -> str | None:
        """The weakest source that random layers drew from: the run's "key", or torch "seeded" by hand; else None."""
        told = {sitting.draws for sitting in self.sittings}
        return "seeded" if "seeded" in told else "key" if told == {"key"} else None

    @property
    def probed(self) -> bool | None:
        """Whether every sitting was examined for coupled losses; None if that is not recorded."""
        found: bool | None = self._told("probed", False)
        return found

    @property
    def planned_tests(self) -> tuple[str, ...] | None:
        """The tests of the loss that were planned in every process of the run; None if that is not recorded."""
        told = [sitting.planned_tests for sitting in self.sittings]
        if () in told:
            return ()
        if not told or None in told:
            return None
        return tuple(name for name in told[0] or () if all(name in (tests or ()) for tests in told))

    @property
    def noise(self) -> str | None:
        """The weakest kind of noise of any sitting; None if that is not recorded."""
        found: str | None = self._told("noise", "standard")
        return found

    @property
    def is_shared(self) -> bool:
        """Whether several runs have charged the ledger."""
        return multi_run.is_shared(self.history)

    @property
    def budget(self) -> float | None:
        """The epsilon that no step of any run could pass; None if a run in the ledger has no budget."""
        if not self.is_shared:
            return self.about.budget
        latest = {sitting.run: sitting.budget for sitting in self.sittings}
        found = [latest.get(entry.run) for entry in self.history]
        return None if None in found else max(budget for budget in found if budget is not None)

    def assumptions(self) -> tuple[str, ...]:
        """What the guarantee rests on and no computation has shown."""
        probed = {
            True: "probed on the first batches, not proven",
            False: "not probed, not proven",
            None: "not recorded whether it was probed",
        }[self.probed]
        several = ": who has several records in it is protected less"
        owned = f"one item of the data set is one {self.spent.unit}{several if self.spent.unit is Unit.RECORD else ''}"
        text = self._text()
        found = [
            text.separate or f"{wording.INDEPENDENT}: {probed}; {wording.planned(self.planned_tests)}",
            wording.OWNED if self.spent.unit is Unit.USER else owned,
            wording.KEY_IS_GIVEN if self.seeded else wording.KEY_IS_SECRET,
            wording.RANDOM_LAYERS[self.draws],
        ]
        found += text.assumptions
        if (kind := self.noise) is not None:
            found.append(wording.PSEUDO_RANDOM.get(kind, kind))
        if any(sitting.followed_metric for sitting in self.sittings):
            found.append(wording.FOLLOWED_METRIC)
        if any(sitting.penalised for sitting in self.sittings):
            found.append(wording.PENALISED)
        found += wording.declared(self.declared)
        if self.is_shared:
            found.append(wording.FIXED_RUNS)
        elif len(self._releases()) > 1:
            found.append(
                "how many steps of each kind to take was not decided by looking at what was released"
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON; what is infinite or not recorded is None."""
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
            "versions": {"run": self._software(), "statement": versions()},
        }
        result: dict[str, Any] = plain(content)
        return result

    def __str__(self) -> str:
        s, divisor = self.spent, self.about.divisor
        size = "" if self.dataset_size is None else f", {self.dataset_size} of them"
        figures = f"({rounded_up(s.epsilon)}, {s.delta:g})-differential privacy of every released model"
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
            *([] if self.history else [("releases", "none so far")]),
            ("sensitivity", self._sensitivity()),
            ("noise", self._noise()),
            ("divisor", NOT_RECORDED if divisor is None else f"{divisor:g}, a public constant"),
            *(("accountant", text) for text in self._accountants()),
            *self._budget(),
            ("attacker", self._attacker()),
            ("tuning", self._tuning()),
            ("public data", wording.public_data(self._text().public_data, self.about.public_statistics)),
            *(("assumption", text) for text in self.assumptions()),
            *(("not covered", text) for text in wording.not_covered(s.unit, self.noise)),
            *(("software", _listed(found)) for found in self._software()),
            ("read with", _listed(versions())),
        ]
        if not self.exact:
            state = "the run goes on or did not end cleanly, or a step failed"
            lines.insert(1, ("state", f"{state}: all that may have been released is counted"))
        return "\n".join(["Privacy statement", *_labelled(lines)])

    def _tuning(self) -> str:
        runs = len({entry.run for entry in self.history})
        return wording.TUNING.format(these=f"{runs} runs" if runs > 1 else "one run")

    def _text(self, unit: Unit | None = None) -> StatementText:
        """What the strategy says about itself."""
        recorded = self.about.strategy or {}
        return recorded_strategy(recorded).statement_text(recorded, unit or self.spent.unit)

    def _released(self) -> str:
        beside = self._text().released
        return f"{wording.RELEASED}; {beside}" if beside else wording.RELEASED

    def _releases(self) -> dict[Event, int]:
        """How often each kind of step was taken: more than one if runs have joined or changed."""
        counts: dict[Event, int] = {}
        for entry in self.history:
            counts[entry.event] = counts.get(entry.event, 0) + entry.count
        return counts

    def _step(self, e: Event, count: int) -> str:
        what = self._text(e.unit).sum + wording.beside(self.about.parts or ())
        return (
            f"{count} steps, {e.sampling} sampling at rate {e.sample_rate:.6g} ({wording.drawn(e.sampling, e.unit)}), "
            f"each a Gaussian mechanism on {what} with noise multiplier {e.noise_multiplier:.4g}"
        )

    def _sensitivity(self) -> str:
        parts = self.about.parts
        if parts is None:
            return NOT_RECORDED
        text = ", ".join(f"{p.name}: {p.sensitivity:g}" for p in parts[:4])
        text += f" and {len(parts) - 4} more parts" if len(parts) > 4 else ""
        text += wording.what_moves(parts, self.spent.unit)
        if wording.counts(parts):  # then the bounds adapt to what was counted
            text += " (of the next step: max_norm adapts to the released counts, and the noise to it)"
        else:
            text += self._text().changing
        return text

    def _noise(self) -> str:
        kinds = dict.fromkeys(sitting.noise for sitting in self.sittings)
        text = "; then ".join(NOT_RECORDED if k is None else wording.NOISE.get(k, k) for k in kinds)
        grids = [p.grid for p in self.about.parts or () if p.grid]
        if grids:
            finest, coarsest = (round(math.log2(g)) for g in (min(grids), max(grids)))
            step = f"2^{finest}" + (f" to 2^{coarsest}" if coarsest > finest else "")
            text += f" (step {step}, which the sensitivities include)"
        return text or NOT_RECORDED

    def _accountants(self) -> list[str]:
        """How it was accounted; which figure holds for runs that share a ledger, and which one under an assumption."""
        found = [
            f"{self.spent.accountant}, an upper bound; steps add up, all parts of a step are one release"
        ]
        if not self.is_shared:
            return found
        runs = len({entry.run for entry in self.history})
        found.append(
            f"{runs} runs have charged this ledger. The Renyi filter holds also where a run was configured after "
            "releases of others were seen; its order follows from the first plan in the ledger, and from no release"
        )
        if self.if_fixed is not None:
            found.append(f"pld: epsilon {rounded_up(self.if_fixed)} {multi_run.IF_FIXED}")
        return found

    def _budget(self) -> list[tuple[str, str]]:
        if self.budget is not None:
            whose = " for all runs together: a step of any of them" if self.is_shared else ": a step"
            return [("budget", f"epsilon {self.budget:g}{whose} that would pass it is refused")]
        if self.is_shared and any(sitting.budget is not None for sitting in self.sittings):
            return [
                ("budget", "none for the whole ledger: some of its runs have no budget, and are not refused")
            ]
        return []

    def _attacker(self) -> str:
        found = ", ".join(f"{percent(power)} at {100 * rate:g}%" for rate, power in self.risk.power)
        claim = f"{wording.WITH_A_FRESH_KEY} this bound: " if self.seeded else ""
        return (
            f"{claim}who knows all other {self.spent.unit}s detects the change with probability at most {found} false "
            f"alarms; advantage at most {percent(self.risk.advantage)}"
        )

    def _software(self) -> list[dict[str, str]]:
        """What the run ran on, once for each change."""
        found: list[dict[str, str]] = []
        for sitting in self.sittings:
            if sitting.versions and dict(sitting.versions) not in found:
                found.append(dict(sitting.versions))
        return found


def of_releases(
    history: Sequence[Entry],
    event: Event,
    delta: float,
    accountant: str | None = None,
    plan: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Statement:
    """The statement of what was released: the figures, and the facts that `Statement` takes besides.

    Args:
        history: all releases.
        event: the kind of step to name if there are none yet.
        delta: of the guarantee.
        accountant: by which it is stated; by default PLD for a single run, and the Renyi filter for several.
        plan: of the first run, for the filter.
    """
    event = history[-1].event if history else event
    accountant = multi_run.accountant_of(history) if accountant is None else accountant
    delta = number("delta", delta, above=0, below=1)
    spent = Spent(
        epsilon=multi_run.epsilon_of(history, delta, accountant, plan),
        delta=delta,
        adjacency=event.adjacency,
        unit=event.unit,
        sampling=event.sampling,
        steps=sum(entry.count for entry in history),
        accountant=accountant,
        reproducible=any(sitting.seeded is True for sitting in facts.get("sittings", ())),
        assumption=multi_run.assumption_of(history, accountant),
    )
    if multi_run.is_shared(history):
        facts["if_fixed"] = multi_run.epsilon_of(history, delta, "pld")
    return Statement(spent=spent, history=tuple(history), risk=Risk.of(history), **facts)


def of_ledger(path: str | os.PathLike[str], delta: float | None = None) -> Statement:
    """The statement of the run in a ledger file, which is only read.

    Args:
        path: the file.
        delta: by default the one that the run was made for, or one well below 1 / size of the data set.
    """
    found = ledger.read(path)
    if not found.history:
        raise LedgerError(f"{path} holds no release yet: there is nothing to state.")
    sittings = tuple(About.from_dict(about) for about in found.about)
    size = found.header.get("dataset_size")
    size = size if isinstance(size, int) else None
    if delta is None:
        delta = sittings[-1].delta if sittings else None
    if delta is None:
        delta = delta_of(None, None, size or 1)
    return of_releases(
        found.history,
        found.history[-1].event,
        delta,
        plan=found.plan,
        run=found.run,
        sittings=sittings,
        dataset_size=size,
        exact=found.exact,
        declared=found.declared,
        weights={True: wording.CLOSED, False: wording.NOT_VERIFIED, None: wording.NOT_CLOSED}[found.verified],
    )


def percent(share: float) -> str:
    """To four digits, never below what was proven."""
    return f"{rounded_up(100 * share)}%"


def _labelled(lines: Sequence[tuple[str, str]]) -> list[str]:
    """A label stands before the first of the lines that it is for."""
    labels = ["", *(name for name, _ in lines)]
    return [
        f"  {'' if name == before else name:<12} {text}"
        for before, (name, text) in zip(labels, lines, strict=False)
    ]


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {v}" for name, v in found.items())
