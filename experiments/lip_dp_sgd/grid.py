"""The runs of the paper's tables and figures, in order of importance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from experiments.harness.search import Asked
from experiments.harness.store import Cell
from experiments.lip_dp_sgd.claims import METHODS, NORMS, TABLES
from experiments.lip_dp_sgd.jobs import Bias, Times
from experiments.lip_dp_sgd.search import SEARCH, Row
from experiments.lip_dp_sgd.sets import DIGITS, IMAGES
from experiments.lip_dp_sgd.trial import Trial

FIGURES = ("table-1", "table-5", "1", "2", "3", "4")
TABLE_SEEDS, IMAGE_SEEDS, QUICK_SEEDS = 10, 3, 3
EPSILONS, TUNED_AT = (1.0, 3.0, 8.0), 3.0  # of figure 1; settings are chosen at the latter
IMAGE_METHODS = ("dp-sgd", "lip")
# The networks for images have windows that do not overlap, for weight clipping. DP-SGD also runs with the others.
OVERLAPPING = {"fashion_mnist": "convnet6", "cifar10": "shallow_vgg"}
TIMED = {"credit_default": (32, 64, 128, 256, 512), "mnist": (32, 64, 128, 256, 512)}
BIASED = ("students_dropout", "adult")
AVERAGED, AVERAGED_DATA = 0.99, "fashion_mnist"
QUICK_EPSILON = 8.0


def asked(
    figures: tuple[str, ...], quick: bool, found: Mapping[str, Cell], seeds: int | None = None
) -> Iterator[Asked]:
    """The runs that can start now, from the finished ones by key. By default all figures with their own seeds."""
    seeds_of_tables = seeds or (QUICK_SEEDS if quick else TABLE_SEEDS)
    seeds_of_images = seeds or (QUICK_SEEDS if quick else IMAGE_SEEDS)
    for figure in figures or FIGURES:
        if figure.startswith("table-"):
            for row in table_rows(figure, quick):
                yield from SEARCH.chosen_and_tested(row, figure, quick, found, seeds_of_tables)
        elif figure == "1":
            for row in image_rows(quick):
                yield from _figure_1(row, quick, found, seeds_of_images)
        elif figure == "2":
            yield from _figure_2(quick)
        elif figure == "3":
            yield from _figure_3(quick, found)
        else:
            yield from _figure_4(quick, found, seeds_of_images)


def table_rows(figure: str, quick: bool) -> list[Row]:
    """Table 1 has no norm; table 5 has both."""
    tables = {DIGITS: QUICK_EPSILON} if quick else {name: claim.epsilon for name, claim in TABLES.items()}
    norms = NORMS[:1] if figure == "table-1" else NORMS
    return [Row(d, norm, m, epsilon) for norm in norms for d, epsilon in tables.items() for m in METHODS]


def image_rows(quick: bool) -> list[Row]:
    """Figure 1, at the epsilon at which settings are chosen."""
    found = []
    for name in (DIGITS,) if quick else IMAGES:
        for norm in NORMS:
            found += [Row(name, norm, method, TUNED_AT) for method in IMAGE_METHODS]
            if name in OVERLAPPING:
                found.append(Row(name, norm, "dp-sgd", TUNED_AT, OVERLAPPING[name]))
    return found


def _figure_1(row: Row, quick: bool, found: Mapping[str, Cell], seeds: int) -> Iterator[Asked]:
    yield from SEARCH.trials(row, "1", quick, found)
    chosen = SEARCH.best(row, quick, found)
    if chosen is not None:
        yield from _at_every_epsilon(row, chosen, "1", quick, seeds)


def _at_every_epsilon(row: Row, chosen: Trial, figure: str, quick: bool, seeds: int) -> Iterator[Asked]:
    for epsilon in EPSILONS[:1] if quick else EPSILONS:
        for seed in range(seeds):
            yield Asked(chosen.but(epsilon=epsilon), seed, "test", figure, row.label, epsilon)


def _figure_2(quick: bool) -> Iterator[Asked]:
    timed = {DIGITS: (64, 256)} if quick else TIMED
    for name, sizes in timed.items():
        for size in sizes:
            yield Asked(Times(name, size), 0, "validation", "2", f"{name}/{size}")


def _figure_3(quick: bool, found: Mapping[str, Cell]) -> Iterator[Asked]:
    """Along the run of DP-SGD that did best."""
    for name in (DIGITS,) if quick else BIASED:
        row = Row(name, "none", "dp-sgd", QUICK_EPSILON if quick else TABLES[name].epsilon)
        yield from SEARCH.trials(row, "3", quick, found)
        chosen = SEARCH.best(row, quick, found)
        if chosen is not None:
            yield Asked(Bias(chosen), 0, "validation", "3", name)


def _figure_4(quick: bool, found: Mapping[str, Cell], seeds: int) -> Iterator[Asked]:
    """The best runs of figure 1, with averaged and with last parameters."""
    for row in image_rows(quick):
        if row.norm == "none" and row.data in (AVERAGED_DATA, DIGITS) and row.network is None:
            yield from SEARCH.trials(row, "4", quick, found)
            chosen = SEARCH.best(row, quick, found)
            if chosen is not None:
                yield from _at_every_epsilon(row, chosen.but(averaged=AVERAGED), "4", quick, seeds)
