"""report.html: its content, figures, escaping, and that it is one file without requests."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from clipwise import FileLedger, accounting
from clipwise.errors import ConfigurationError
from clipwise.privacy import rounded_up
from clipwise.report import wording
from clipwise.report.page import write_comparison, write_page
from clipwise.report.page.report import report
from clipwise.report.record import RunRecord
from clipwise.report.statement import of_ledger
from tests.cli.calls import EVENT, write_ledger
from tests.report.page.pages import Page
from tests.report.run_folders import run_folder, with_audit

STYLE = Path(__file__).parents[3] / "src" / "clipwise" / "report" / "page" / "style.css"
HOSTILE = "<img src=http://x.test/a onerror=alert(1)>\"'&</style></script>"


@pytest.fixture(scope="session")
def page(record: RunRecord) -> Page:
    return Page(report(record))


def test_the_page_answers_its_questions(page: Page) -> None:
    for title in (
        "How much an attacker learns",
        "What was trained on what",
        "Accuracy as released",
        "How the budget was spent",
        "What is not protected",
        "How the guarantee was obtained",
        "Audit",
        "Configuration and versions",
    ):
        assert page.text.count(title) == 2, title  # in the contents and as a heading
    assert "If any one record of the data set had been replaced by an empty one" in page.text
    assert "83.0% 79.0% to 87.0%, 95% confidence" in page.text and "parallel composition" in page.text
    assert "This run was not audited" in page.text and wording.NOT_COVERED[1] in page.text
    assert "5 categories, released with noise" in page.text and "torch" in page.text


def test_an_accuracy_that_is_not_known_has_no_picture(record: RunRecord) -> None:
    known = record.released[0]
    unknown = {**known, "value": 0.0, "low": 0.0, "high": 1.0}
    pages = [report(replace(record, metrics=(line,))) for line in (known, unknown)]
    assert ['class="interval"' in text for text in pages] == [True, False] and "not known" in pages[1]


def test_figures_equal_those_of_the_accountant(run: Path, page: Page) -> None:
    history = of_ledger(run / "ledger").history
    curve = accounting.tradeoff_of(history)
    for figure in (
        f"epsilon, at delta 1e-5 {rounded_up(accounting.epsilon_of(history, 1e-5))}",
        f"mu of Gaussian differential privacy {rounded_up(curve.mu(1e-5), 3)}",
        f"At most {rounded_up(100 * curve.power(0.01), 3)} of 100 are detected",
        f"{rounded_up(100 * curve.precision(0.01, 0.1), 3)}% odds",
    ):
        assert figure in page.text, figure


def test_it_is_one_file_without_requests_or_scripts(page: Page) -> None:
    assert all(link.startswith("#") or link == "data:," for link in page.links)
    assert not page.named("script") and not page.named("iframe") and "@import" not in STYLE.read_text()
    assert "url(" not in STYLE.read_text()
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert any("default-src 'none'" in (each.get("content") or "") for each in page.named("meta"))


def test_it_is_accessible(page: Page) -> None:
    assert page.named("html")[0]["lang"] == "en" and len(page.named("main")) == len(page.named("h1")) == 1
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    for drawing in page.named("svg"):
        assert drawing.get("aria-label") or drawing.get("aria-hidden") == "true"
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch(r"h[1-6]", name)]
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("name", ["seeded", "not_private"])
def test_a_run_without_guarantee_begins_with_a_warning(name: str, request: pytest.FixtureRequest) -> None:
    record = RunRecord.read(request.getfixturevalue(name))
    page = Page(report(record))
    main = page.text.partition("Skip to the report")[2].strip()
    assert main.startswith(f"No privacy guarantee {record.no_guarantee}")
    for claim in ("How much an attacker learns", "would have been the same", "epsilon, at delta", "Trade-off"):
        assert claim not in page.text


def test_text_of_a_user_is_escaped(tmp_path: Path) -> None:
    options = {"private": False, "evaluated": False, "description": HOSTILE, "group": HOSTILE}
    folder, other = (run_folder(tmp_path / n, name=HOSTILE + n, **options) for n in ("1", "2"))
    for file in (write_page(folder), write_comparison([folder, other], tmp_path / "both.html")):
        page = Page(file.read_text())
        assert not page.named("img") and not page.named("script") and len(page.named("style")) == 1
        assert not any("x.test" in link for link in page.links)
        assert page.text.count(" ".join(HOSTILE.split())) >= 2


@pytest.mark.slow
def test_the_audit(run: Path, record: RunRecord, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "copy"))
    assert record.training is not None
    passed = Page(report(RunRecord.read(with_audit(folder, record.training.run))))
    assert "Passed." in passed.text and "attacks of the audit: at least this good" in passed.text
    failed = Page(report(RunRecord.read(with_audit(folder, record.training.run, ok=False))))
    assert "Failed." in failed.text and "Passed." not in failed.text


def test_an_open_run_has_a_note(tmp_path: Path) -> None:
    write_ledger(tmp_path / "ledger", 9, close=False)
    page = Page(write_page(tmp_path).read_text())
    assert "All releases that may have happened are counted" in page.text


def test_runs_that_share_a_ledger_have_a_note(tmp_path: Path) -> None:
    for _ in range(2):
        with FileLedger(tmp_path / "ledger", join=True) as ledger:
            ledger.charge(EVENT)
    page = Page(write_page(tmp_path).read_text())
    assert "Several runs share the ledger: the bounds on attacks" in page.text and "renyi-filter" in page.text


def test_the_report_of_a_ledger_alone(tmp_path: Path) -> None:
    file = write_page(write_ledger(tmp_path / "first.ledger", 9))
    assert file == tmp_path / "first.html"
    page = Page(file.read_text())
    assert "first.ledger" in page.text and "How much an attacker learns" in page.text
    assert "What was trained on what" not in page.text
    assert write_page(write_ledger(tmp_path / "ledger", 9)).name == "report.html"


def test_a_file_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_page(run, tmp_path / "no" / "report.html")
    with pytest.raises(ConfigurationError, match="at least two"):
        write_comparison([run], tmp_path / "both.html")


def test_runs_with_other_units_are_not_mixed(record: RunRecord) -> None:
    assert record.evaluation is not None
    spent = replace(record.evaluation.spent, unit="user")
    with pytest.raises(ConfigurationError, match="different adjacencies or units"):
        report(replace(record, evaluation=replace(record.evaluation, spent=spent)))


def test_a_comparison_names_every_run(run: Path, seeded: Path, not_private: Path, tmp_path: Path) -> None:
    page = Page(write_comparison([run, seeded, not_private], tmp_path / "all.html").read_text())
    main = page.text.partition("Skip to the report")[2].strip()
    assert main.startswith("No privacy guarantee seeded : This run used a given seed")
    record = RunRecord.read(run)
    assert rounded_up(record.epsilon) in page.text and "Runs on the same records compose" in page.text
    assert len(page.named("polyline")) == 3  # the one run with a guarantee, guessing, and epsilon over steps
    assert "steps 20 5 20" in page.text  # the settings that differ


def test_runs_of_the_same_name_are_named_by_their_paths(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "copy"))
    page = Page(write_comparison([run, other], tmp_path / "all.html").read_text())
    assert str(run) in page.text and str(other) in page.text


# Contrast, by WCAG 2: at least 4.5 for text and 3 for lines.


def _luminance(colour: str) -> float:
    if len(colour) == 4:
        colour = "#" + "".join(2 * c for c in colour[1:])
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "print"])
def test_colours_have_enough_contrast(scheme: int) -> None:
    block = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", block))
    for name in ("ink", "soft", "accent", "good"):
        assert min(_contrast(colours[name], colours[paper]) for paper in ("paper", "panel")) >= 4.5, name
    assert min(_contrast(colours[name], colours["warn-paper"]) for name in ("warn", "ink")) >= 4.5
    assert min(_contrast(colours[f"l{n}"], colours["paper"]) for n in range(6)) >= 3
