import json
from dataclasses import replace

import pytest
import torch

from benchmarks import runner, suite
from benchmarks.methods import AUTO, COMPILED, PLAIN_AND_NOISE, REFERENCE, REWEIGHT
from benchmarks.networks import build
from benchmarks.options import Options
from benchmarks.peers import measure
from benchmarks.scaling import run
from benchmarks.scaling.axes import ON_CPU, ON_CUDA, QUICK, axes_for
from benchmarks.scaling.curves import QUANTITIES, growth
from benchmarks.scaling.run import usual_columns
from benchmarks.shapes import shape_of
from benchmarks.timing import Effort
from benchmarks.workload import losses_of
from clipwise.errors import ConfigurationError

TIME, MEMORY = QUANTITIES


@pytest.fixture(autouse=True)
def unplotted(request, monkeypatch):
    """Drawing takes longer than everything else here, so only some tests draw."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(run, "plot_all", lambda results, folder: [])


@pytest.fixture
def drawn():
    pytest.importorskip("matplotlib")


def fake(row, columns, device, seed, effort, most_seconds):
    """Plain training takes x milliseconds and x MiB; each further column half as much more."""
    x = int(row.name.partition("=")[2])
    figures = {}
    for number, name in enumerate(columns):
        ratio = 1 + number / 2
        figures[name] = {"seconds": x * ratio / 1000, "peak_bytes": x * ratio * 2**20, "ratio": ratio}
        figures[name] |= {f"{what}_over": {REFERENCE: ratio} for what in ("time", "memory")} | {"rounds": 5}
    return {"row": row.name, "setting": row.setting.key, "columns": figures}


@pytest.fixture
def made(monkeypatch):
    """Measurements that take no time; gives the list of those made."""
    calls = []

    def measured(row, columns, *rest):
        calls.append((row.name, columns))
        return fake(row, columns, *rest)

    monkeypatch.setattr(suite, "measure_row", measured)
    return calls


def scaling(folder, **options):
    said = []
    runner.bench(Options(out=folder, suite="scaling", **({"quick": True} | options)), said.append)
    return said


def table_of(folder):
    return (folder / "results.md").read_text()


NAMES = [row.name for axis in QUICK for row in axis.rows.values()]


# --------------------------------------------------------------------- axes


@pytest.mark.parametrize("axes", [ON_CUDA, ON_CPU, QUICK])
def test_along_an_axis_one_number_grows_and_all_else_stays(axes):
    assert [axis.name for axis in axes] == ["T", "B", "width"]
    for axis in axes:
        assert list(axis.rows) == sorted(set(axis.rows)) and len(axis.rows) > 1
        held = set()
        for x, row in axis.rows.items():
            number, rest = split(axis.name, row.setting)
            assert number == x and row.name == f"{axis.name}={x}" and not row.targets
            held.add(rest)
        assert len(held) == 1


def split(axis, setting):
    """The number that grows along an axis, and all else of a setting."""
    if axis == "T":
        return shape_of(setting.data).length, replace(setting, data=setting.data.partition("-")[0])
    if axis == "B":
        return setting.batch, replace(setting, batch=0)
    depth, _, width = setting.model.partition("x")
    return int(width), replace(setting, model=depth)


@pytest.mark.parametrize("axes", [ON_CUDA, ON_CPU, QUICK])
def test_the_ends_of_an_axis_can_be_built(axes):
    for axis in axes:
        for row in (axis.rows[min(axis.rows)], axis.rows[max(axis.rows)]):
            shape = shape_of(row.setting.data)
            with torch.device("meta"):  # shapes alone: nothing is computed
                model, (x, y) = build(row.setting.model, shape), shape.draw(2)
                assert losses_of(model(x), y).shape == (2,)


def test_axes_are_chosen_by_name():
    assert [axis.name for axis in axes_for("cpu", wanted=["width", "T"])] == ["T", "width"]
    assert axes_for("cuda") == list(ON_CUDA)
    with pytest.raises(ConfigurationError, match="row='depth' is no axis"):
        axes_for("cpu", wanted=["depth"])


def test_compiled_steps_are_measured_where_there_are_graphs():
    assert usual_columns(torch.device("cpu")) == {REFERENCE, AUTO, REWEIGHT}
    assert usual_columns(torch.device("cuda")) == {REFERENCE, AUTO, REWEIGHT, COMPILED}


# ------------------------------------------------------------------ running


def test_points_are_measured_once_and_each_is_on_disk_at_once(made, tmp_path, monkeypatch):
    whole = suite.measure_row

    def dies(row, *rest):
        if row.name == NAMES[2]:
            raise KeyboardInterrupt
        return whole(row, *rest)

    monkeypatch.setattr(suite, "measure_row", dies)
    with pytest.raises(KeyboardInterrupt):
        scaling(tmp_path)
    assert "## Examples: CNN\n\nNot measured." in table_of(tmp_path)
    monkeypatch.setattr(suite, "measure_row", whole)
    scaling(tmp_path)
    assert [name for name, _ in made] == NAMES
    assert list(json.loads((tmp_path / "results.json").read_text())["cells"]) == NAMES


def test_axes_and_columns_can_be_selected(made, tmp_path):
    scaling(tmp_path, rows=["B"], methods=[PLAIN_AND_NOISE, AUTO])
    assert made == [(name, [REFERENCE, PLAIN_AND_NOISE, AUTO]) for name in NAMES if name.startswith("B=")]
    (command,) = (run["command"] for run in json.loads((tmp_path / "results.json").read_text())["runs"])
    assert command.startswith("python -m benchmarks scaling --device cpu --row B --method")


def test_a_point_of_another_suite_is_not_mixed_in(made, tmp_path):
    scaling(tmp_path)
    with pytest.raises(ConfigurationError, match="another suite"):
        runner.bench(Options(out=tmp_path, suite="peers", quick=True), lambda line: None)


def test_a_real_point_has_times_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "_QUICK", Effort(1, least_rounds=1, enough_seconds=0.0, cell_seconds=20.0))
    monkeypatch.setattr(measure, "peak_memory", lambda setting, name, *_: 2**20 if name == REFERENCE else 2**21)
    scaling(tmp_path, rows=["width"], methods=[AUTO])
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert len(cells) == 2
    for cell in cells.values():
        assert TIME.value(cell, AUTO) > 0 and TIME.ratio(cell, AUTO) == cell["columns"][AUTO]["ratio"]
        assert MEMORY.value(cell, AUTO) == MEMORY.ratio(cell, AUTO) == 2.0


# ---------------------------------------------------------------- rendering


def test_the_exponent_is_that_of_the_last_two_points():
    def cells(times):
        return {x: {"columns": {AUTO: {"seconds": t}}} for x, t in times.items()}

    assert growth(cells({1: 9.0, 4: 2.0, 8: 8.0}), TIME, AUTO) == pytest.approx(2.0)
    assert growth(cells({4: 2.0, 16: 8.0}), TIME, AUTO) == pytest.approx(1.0)
    assert growth(cells({4: 2.0, 16: None}), TIME, AUTO) is None
    assert growth(cells({4: 2.0}), MEMORY, AUTO) is None


def test_tables_have_both_quantities_absolute_and_as_ratios(made, tmp_path):
    said = scaling(tmp_path, rows=["B"], methods=[AUTO])
    rows = [line for line in table_of(tmp_path).splitlines() if line.startswith("| 4 |")]
    assert rows == ["| 4 | 4 | 6 (1.50x) |"] * 2  # milliseconds, then MiB
    assert table_of(tmp_path).count("| exponent | 1.00 | 1.00 |") == 2
    assert any(table_of(tmp_path) in line for line in said)


def test_what_failed_has_its_reason(tmp_path, monkeypatch):
    def failing(row, columns, *rest):
        cell = fake(row, columns, *rest)
        cell["columns"][AUTO] = {"failed": "out of memory"}
        return cell | ({"notes": ["a slow rule"]} if row.name == "T=8" else {})

    monkeypatch.setattr(suite, "measure_row", failing)
    scaling(tmp_path, rows=["T"])
    table = table_of(tmp_path)
    assert "| 8 [1] | 8 | none [2] | 16 (2.00x) |" in table
    assert "1. a slow rule\n2. out of memory" in table


def test_rendering_again_gives_the_same_files(made, drawn, tmp_path):
    scaling(tmp_path)
    files = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    assert set(files) == {"results.json", "results.md", "T.svg", "B.svg", "width.svg"}
    runner.render(tmp_path, lambda line: None)
    assert files == {f.name: f.read_bytes() for f in tmp_path.iterdir()}


def test_a_point_that_failed_leaves_a_gap_in_its_plot(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "measure_row", lambda row, *_: {"row": row.name, "failed": "no luck"})
    scaling(tmp_path, rows=["T"])
    assert (tmp_path / "T.svg").exists() and "1. no luck" in table_of(tmp_path)


def test_without_matplotlib_the_tables_are_there(made, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "can_draw", lambda: False)
    said = scaling(tmp_path)
    assert any("clipwise-dp[plots]" in line for line in said) and table_of(tmp_path)
