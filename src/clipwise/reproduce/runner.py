"""`clipwise reproduce batch-clipping`: run what is missing of the grid, in the declared order, and write tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from clipwise.bench.environment import device_of, environment
from clipwise.bench.limits import Deadline, reason_of
from clipwise.errors import ConfigurationError
from clipwise.files import replace_file
from clipwise.reproduce import report, tuned
from clipwise.reproduce.figures import FIGURES, Figure
from clipwise.reproduce.pictures import Pictures, pictures
from clipwise.reproduce.setting import Setting
from clipwise.reproduce.store import Cell, Store
from clipwise.reproduce.training import OutOfTimeError, train

Say = Callable[[str], None]
QUICK_FIGURES, QUICK_ROWS = ("4", "18", "B"), 5
QUICK_METHODS = ("IC, flat, group norm", "BC, flat, batch norm", "BC, multipliers (optimal), batch norm")


@dataclass(frozen=True)
class Options:
    """What the command was asked for.

    Attributes:
        figures: by name, and "equal-epsilon"; all if empty.
        data: the folder of data sets.
        seeds: how many runs of each row of a figure.
        epochs: at most so many, in place of what a row has.
        quick: few rows, on the digits that ship with clipwise: shows that it works, not how well.
        retry: run again what failed.
    """

    out: Path
    figures: tuple[str, ...] = ()
    data: Path | None = None
    device: str = "cpu"
    seeds: int = 1
    epochs: int | None = None
    quick: bool = False
    budget_seconds: float | None = None
    retry: bool = False

    @property
    def command(self) -> str:
        """Without the names of folders, which mean nothing elsewhere."""
        words = ["clipwise reproduce batch-clipping", *(f"--figure {name}" for name in self.figures)]
        words += ["--data DIR"] if self.data else []
        words += [f"--device {self.device}", f"--seeds {self.seeds}"]
        words += [f"--epochs {self.epochs}"] if self.epochs else []
        return " ".join([*words, *(["--quick"] if self.quick else [])])


def reproduce(options: Options, say: Say) -> Store:
    """Run what is missing and write results.json and results.md."""
    everything = [figure.name for figure in FIGURES] + [tuned.NAME]
    for name in options.figures:
        if name not in everything:
            raise ConfigurationError(f"figure={name!r} is not known: use one of {', '.join(everything)}.")
    run = _Run(options, say)
    try:
        for figure in FIGURES:
            if figure.name in (options.figures or (QUICK_FIGURES if options.quick else everything)):
                run.figure(figure)
        if not options.figures or tuned.NAME in options.figures:
            run.equal_epsilon()
    except OutOfTimeError:
        say("the time is up: the same command goes on where it stopped")
    text = report.markdown(run.store, options.quick)
    replace_file(options.out / "results.md", lambda file: file.write(text.encode()), mode=0o644)
    say(f"wrote {options.out / 'results.md'}")
    return run.store


class _Run:
    """One command: a store, a device, and the time that is left."""

    def __init__(self, options: Options, say: Say) -> None:
        self._options, self._say = options, say
        self._device = device_of(options.device)
        self._deadline = Deadline(options.budget_seconds)
        self.store = Store(options.out)
        self.store.begin(options.command, environment(self._device))
        self._pictures = lru_cache(maxsize=2)(self._load)

    def figure(self, figure: Figure) -> None:
        """Every row and seed of one figure."""
        for row in figure.rows[: QUICK_ROWS if self._options.quick else None]:
            for seed in range(self._options.seeds):
                self._cell(row.setting, seed, "test", {"figure": figure.name, "row": row.label})

    def equal_epsilon(self) -> None:
        """Trials of each method on the validation part; then the best of them, on the test part."""
        quick = self._options.quick
        for epsilon in tuned.EPSILONS[-1:] if quick else tuned.EPSILONS:
            for method in QUICK_METHODS if quick else tuned.METHODS:
                where = {"figure": tuned.NAME, "row": method, "budget": epsilon}
                tried = tuned.trials(method, epsilon)[:2] if quick else tuned.trials(method, epsilon)
                cells = [self._cell(setting, 0, "validation", where) for setting in tried]
                found = [(cell["accuracy"], -i) for i, cell in enumerate(cells) if "accuracy" in cell]
                if found:
                    best = tried[-max(found)[1]]
                    for seed in range(1 if quick else tuned.SEEDS):
                        self._cell(best, seed, "test", where)

    def _cell(self, setting: Setting, seed: int, judged_by: str, where: dict[str, Any]) -> Cell:
        """One run: from disk if it is there. Rows of several figures that are the same run share it."""
        in_full = setting.epochs
        setting = self._shortened(setting)
        key = f"{judged_by} {setting.key} seed={seed}"
        place = where | {"epochs_asked": in_full, "quick": self._options.quick}
        cell = self.store.cells.get(key)
        shown = cell["shown"] if cell else []
        if cell and place in shown and not (self._options.retry and "failed" in cell):
            return cell
        if cell is None or (self._options.retry and "failed" in cell):
            if self._deadline.left() <= 0:
                raise OutOfTimeError
            cell = {"setting": setting.key, "seed": seed, "judged_by": judged_by, "epochs": setting.epochs}
            cell |= self._trained(setting, seed, judged_by)
            self._say(f"{where['figure']}: {where['row']}, {judged_by}, seed {seed}: {report.in_short(cell)}")
        cell = cell | {"shown": shown if place in shown else [*shown, place]}
        self.store.add(key, cell)
        return cell

    def _trained(self, setting: Setting, seed: int, judged_by: str) -> Cell:
        images = self._pictures(
            setting.data, judged_by
        )  # if it is missing the command ends: that is no result
        try:
            return train(setting, images, seed, self._deadline)
        except OutOfTimeError:
            raise
        except Exception as error:  # a row that cannot run is a result too, and must not end the others
            return {"failed": reason_of(error)}

    def _shortened(self, setting: Setting) -> Setting:
        if self._options.epochs is not None:
            setting = setting.but(epochs=min(setting.epochs, self._options.epochs))
        if not self._options.quick:
            return setting
        model = "bn_lenet5" if setting.model == "resnet18" else setting.model
        return setting.but(data="digits", model=model, epochs=1, batch_size=min(setting.batch_size, 128))

    def _load(self, name: str, judged_by: str) -> Pictures:
        return pictures(name, self._options.data, self._device, judged_by=judged_by)
