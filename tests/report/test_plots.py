from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.accounting import accountants
from clipwise.errors import ConfigurationError, UnsupportedEventError
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit
from clipwise.report import plots, series

pytest.importorskip("matplotlib")

POISSON = [Entry(Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.1, 0.01), 200)]
FULL = [Entry(Event(Sampling.FULL, Adjacency.REPLACE_ONE, Unit.USER, 20.0, 1.0), 50)]
NO_NOISE = [Entry(Event(Sampling.FULL, Adjacency.ZERO_OUT, Unit.RECORD, 0.0, 1.0), 5)]

Draw = Callable[[list[Entry], Path], None]
DRAWINGS: dict[str, Draw] = {
    "steps": lambda history, path: plots.epsilon_over_steps(history, 1e-5, path),
    "curve": lambda history, path: plots.tradeoff_curve(history, path, measured=0.5),
    "delta": plots.delta_profile,
}
every_drawing = pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS)


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of the pictures drawn in a test."""
    from matplotlib.figure import Figure

    seen: list[Any] = []
    save = Figure.savefig

    def remember(self: Figure, *args: Any, **options: Any) -> None:
        seen.extend(self.axes)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    return seen


def labels(panel: Any) -> list[str]:
    return [line.get_label() for line in panel.lines]


@pytest.mark.slow
@every_drawing
@pytest.mark.parametrize("history", [POISSON, FULL], ids=["poisson", "full"])
def test_the_same_history_gives_the_same_file(draw: Draw, history: list[Entry], tmp_path: Path) -> None:
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".SVG", b"<?xml")):
        files = [tmp_path / f"{name}{ending}" for name in ("one", "two")]
        for file in files:
            draw(history, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].read_bytes().startswith(start)


@pytest.mark.slow
@every_drawing
def test_a_picture_has_no_date_and_can_be_parsed(draw: Draw, tmp_path: Path) -> None:
    draw(POISSON, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    ElementTree.fromstring(text)
    assert "<dc:date>" not in text


@every_drawing
def test_lines_differ_without_colour(draw: Draw, tmp_path: Path, axes: list[Any]) -> None:
    for history in (POISSON, FULL):
        draw(history, tmp_path / "a.svg")
    assert axes
    for panel in axes:
        styles = [(line.get_linestyle(), line.get_marker()) for line in panel.lines]
        assert len(styles) > 1
        assert len(set(styles)) == len(styles)


@every_drawing
def test_the_title_states_what_is_guaranteed(draw: Draw, tmp_path: Path, axes: list[Any]) -> None:
    draw(POISSON, tmp_path / "a.svg")
    title = axes[0].get_title(loc="left")
    for word in ("Poisson sampling", "zero-out", "record", "noise multiplier 1.1", "rate 0.01", "200 steps"):
        assert word in title


def test_a_title_of_many_steps_gives_their_range() -> None:
    noisier = Entry(Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 2.5, 0.02), 3)
    unused = Entry(Event(Sampling.FULL, Adjacency.ZERO_OUT, Unit.RECORD, 9.0, 1.0), 0)
    title = plots.describe([*POISSON, noisier, unused])
    assert "noise multiplier 1.1 to 2.5" in title
    assert "sample rate 0.01 to 0.02" in title
    assert "203 steps" in title
    assert "full" not in title
    with pytest.raises(UnsupportedEventError, match="mixes"):
        plots.describe([*POISSON, *FULL])


def test_epsilon_over_steps_is_that_of_the_accountants(tmp_path: Path, axes: list[Any]) -> None:
    plots.epsilon_over_steps(POISSON, 1e-5, tmp_path / "a.svg")
    pld, rdp = axes[0].lines
    assert pld.get_label().startswith("PLD")
    assert rdp.get_label() == "RDP"
    for line, name in ((pld, "pld"), (rdp, "rdp")):
        x, y = line.get_data()
        assert x[0] == y[0] == 0
        assert x[-1] == 200
        assert y[-1] == accountants.epsilon_of(POISSON, 1e-5, name)
        assert np.all(np.diff(y) > 0)


def test_without_amplification_all_accountants_are_drawn(tmp_path: Path, axes: list[Any]) -> None:
    plots.epsilon_over_steps(FULL, 1e-5, tmp_path / "a.svg")
    plots.delta_profile(FULL, tmp_path / "b.svg")
    expected = ["PLD (used for the guarantee)", "RDP", "zCDP", "Gaussian DP"]
    assert [labels(panel) for panel in axes] == [expected, expected]
    exact, _, _, gaussian = (line.get_ydata() for line in axes[1].lines)
    assert np.allclose(exact, gaussian, rtol=1e-9)


def test_tradeoff_curve_is_below_random_guessing(tmp_path: Path, axes: list[Any]) -> None:
    plots.tradeoff_curve(POISSON, tmp_path / "a.svg")
    rates, few_alarms = axes
    assert len(rates.lines) == 2
    alphas, betas = rates.lines[1].get_data()
    assert np.all(betas <= 1 - alphas)
    alphas, detected = few_alarms.lines[1].get_data()
    assert np.all(detected >= alphas)


def test_delta_falls_from_the_advantage(tmp_path: Path, axes: list[Any]) -> None:
    plots.delta_profile(POISSON, tmp_path / "a.svg")
    epsilons, deltas = axes[0].lines[0].get_data()
    assert epsilons[0] == 0
    assert deltas[0] == pytest.approx(accountants.delta_of(POISSON, 0.0), rel=1e-3)
    assert np.all(np.diff(deltas) < 0)
    assert deltas[-1] == pytest.approx(1e-10, rel=0.1)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.data())
def test_first_steps_of_a_history(counts: list[int], data: st.DataObject) -> None:
    event = POISSON[0].event
    history = [Entry(event, count) for count in counts]
    steps = data.draw(st.integers(0, sum(counts)))
    first = series.first_steps(history, steps)
    assert sum(entry.count for entry in first) == steps
    assert all(a.count == b.count for a, b in zip(first[:-1], history, strict=False))


@every_drawing
@pytest.mark.parametrize("name", ["a.pdf", "a", "png"])
def test_other_endings_are_refused_before_anything_is_computed(draw: Draw, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"end in \.png or \.svg"):
        draw(POISSON, tmp_path / name)
    assert not list(tmp_path.iterdir())


@every_drawing
def test_an_empty_history_is_refused(draw: Draw, tmp_path: Path) -> None:
    for history in ([], [Entry(POISSON[0].event, 0)]):
        with pytest.raises(ConfigurationError, match="empty"):
            draw(history, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_without_noise(tmp_path: Path) -> None:
    for draw in (DRAWINGS["steps"], DRAWINGS["delta"]):
        with pytest.raises(ConfigurationError, match="infinite"):
            draw(NO_NOISE, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
    DRAWINGS["curve"](NO_NOISE, tmp_path / "a.png")


@every_drawing
def test_a_folder_that_is_not_there_is_named(draw: Draw, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere.*cannot be written"):
        draw(POISSON, tmp_path / "nowhere" / "a.png")


@every_drawing
def test_without_matplotlib(draw: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'clipwise-dp\[plots\]'"):
        draw(POISSON, tmp_path / "a.png")


def test_a_users_own_settings_do_not_show(tmp_path: Path) -> None:
    import matplotlib

    plots.delta_profile(POISSON, tmp_path / "a.svg")
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30}):
        plots.delta_profile(POISSON, tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
