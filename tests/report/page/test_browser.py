"""The report in headless Chromium: no console message, no request, nothing that axe-core finds, readable everywhere.

`make build/browser` installs Chromium where it is missing. Set SCREENSHOTS to a folder to keep the pictures.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipwise.report.page import write_comparison, write_page
from clipwise.report.record import RunRecord
from tests.report.run_folders import with_audit

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
MISSING = FOUND is None or not all(map(importlib.util.find_spec, ("playwright", "axe_playwright_python")))
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
VIEWS: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1200, "height": 900}},
    "phone": {"viewport": {"width": 360, "height": 740}, "is_mobile": True},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark", "reduced_motion": "reduce"},
    "print": {"viewport": {"width": 794, "height": 1123}},
}

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        MISSING and os.environ.get("CI") != "true",
        reason="needs Chromium, playwright and axe-playwright-python: run `make build/browser`",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert FOUND, "Chromium is missing: run `make build/browser`"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=FOUND, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(run: Path, seeded: Path, not_private: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    audited = Path(shutil.copytree(run, folder / "with-a-longer-name-and-an-audit"))
    training = RunRecord.read(run).training
    assert training is not None
    return {
        "report": write_page(with_audit(audited, training.run)),
        "not-private": write_page(not_private, folder / "not-private.html"),
        "comparison": write_comparison([run, audited, seeded], folder / "comparison.html"),
    }


@pytest.fixture
def opened(
    browser: Any, request: pytest.FixtureRequest, pages: dict[str, Path]
) -> Iterator[tuple[Any, list[str], str]]:
    """A page in a view, what it printed and requested, and its name."""
    name, view = request.param
    context = browser.new_context(**VIEWS[view], bypass_csp=True)  # axe-core is a script, which the page forbids
    page = context.new_page()
    if view == "print":
        page.emulate_media(media="print")
    seen: list[str] = []
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda made: seen.append(made.url) if made.url != pages[name].as_uri() else None)
    page.goto(pages[name].as_uri())
    yield page, seen, f"{name}-{view}"
    context.close()


EVERY = [(name, view) for name in ("report", "not-private", "comparison") for view in VIEWS]


@pytest.mark.parametrize("opened", EVERY, indirect=True, ids=lambda each: "-".join(each))
def test_the_page_makes_no_request_is_accessible_and_fits(opened: tuple[Any, list[str], str]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page, seen, name = opened
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
    assert seen == []
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    found = Axe().run(page).response["violations"]
    assert found == [], [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]


@pytest.mark.parametrize("opened", [("report", "wide")], indirect=True, ids=["report"])
def test_the_keyboard_reaches_everything(opened: tuple[Any, list[str], str]) -> None:
    page, _, _ = opened
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.url.endswith("#report")
    details = page.locator("summary").first
    details.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelector('details').open")


@pytest.mark.parametrize("opened", [("report", "print")], indirect=True, ids=["report"])
def test_print_shows_the_data_of_charts(opened: tuple[Any, list[str], str]) -> None:
    page, _, _ = opened
    assert page.locator("details td").first.bounding_box()["height"] > 0
    assert not page.locator("nav").is_visible()


def test_the_policy_of_the_page_forbids_scripts_and_requests(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    seen: list[str] = []
    page.on("console", lambda message: seen.append(message.text))
    page.goto(pages["report"].as_uri())
    assert seen == []
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))")
    page.wait_for_timeout(300)
    assert any("Content Security Policy" in text for text in seen), seen
    page.close()
