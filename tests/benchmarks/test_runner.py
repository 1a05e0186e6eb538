import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import grid, runner
from benchmarks.__main__ import SCRIPTS, main
from benchmarks.grid import GRID, Figure, figures
from benchmarks.methods import all_methods
from benchmarks.networks import names
from benchmarks.options import SUITES, Options
from benchmarks.records import Results
from benchmarks.shapes import shape_of
from benchmarks.workload import Setting
from clipwise.errors import ConfigurationError

A, B = Setting("mlp-2", "mnist", 4), Setting("mlp-2", "mnist", 8)
TINY = (
    Figure("5", "Tiny five", (A, B), quick=(A,)),
    Figure("6", "Tiny six", (B,), quick=(A, B), panel="model", x="batch", bars=False),
    Figure("largest", "Tiny largest", (Setting("mlp-2", "mnist", 0),), on_cpu=(), largest_batch=True),
)
METHODS = ["non-private", "one by one"]


@pytest.fixture
def tiny(monkeypatch):
    """A grid of two settings, and measurements that take no time; gives the list of those made."""
    made = []

    def measure(setting, method, device, seed, effort, most_seconds):
        made.append((setting, method))
        if method == "vmap":
            return {"setting": setting.key, "method": method, "failed": "out of memory"}
        ratio = 40.0 if method == "one by one" else 2.0
        cell = {"setting": setting.key, "method": method, "notes": ["a slow rule"], "rounds": 1}
        times = {"seconds": ratio / 1000, "reference_seconds": 0.001, "ratio": ratio}
        return cell | times | {"peak_bytes": 3 * 2**20}

    monkeypatch.setattr(grid, "GRID", TINY)
    monkeypatch.setattr(runner, "measure", measure)
    return made


@pytest.fixture(autouse=True)
def unplotted(request, monkeypatch):
    """Drawing takes longer than everything else here, so only some tests draw."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(runner, "plot_all", lambda results, folder: [])


@pytest.fixture
def drawn():
    pytest.importorskip("matplotlib")


def run(folder, **options):
    said = []
    runner.bench(Options(out=folder, **({"methods": METHODS} | options)), said.append)
    return said


def stored(folder):
    return json.loads((folder / "results.json").read_text())


# --------------------------------------------------------------------- grid


def test_the_grid_can_be_built_and_its_order_is_that_of_the_paper():
    assert [f.name for f in GRID] == ["5", "6", "7", "8", "9", "largest", "more"]
    for figure in GRID:
        for setting in (*figure.settings, *(figure.on_cpu or ()), *figure.quick):
            assert setting.model in names()
            assert shape_of(setting.data) is not None
            assert getattr(setting, figure.panel) and getattr(setting, figure.x)


def test_figures_5_to_7_are_whole_on_a_cpu_and_the_largest_networks_are_not_there():
    for figure in GRID:
        on_cpu = figure.chosen("cpu", quick=False)
        assert (on_cpu == figure.settings) == (figure.name in "567")
        assert figure.chosen("cuda", quick=False) == figure.settings
        assert not any(s.model == "resnet101" and s.image_size == 256 for s in on_cpu)


def test_unknown_figures_are_refused():
    with pytest.raises(ConfigurationError, match="figure='10' is not known"):
        figures(["10"])


# ------------------------------------------------------------------ running


def test_every_cell_is_measured_once_in_order_and_kept(tiny, tmp_path):
    run(tmp_path)
    assert tiny == [(s, m) for s in (A, B) for m in METHODS]
    kept = stored(tmp_path)
    assert len(kept["cells"]) == 4
    assert kept["environment"]["device"] == "cpu" and kept["environment"]["versions"]["torch"]
    assert kept["runs"][0]["seed"] == 0 and kept["runs"][0]["command"].startswith("python -m benchmarks --device cpu")


def test_the_largest_batch_is_looked_for_on_a_gpu_where_a_batch_takes_memory(tiny, tmp_path):
    jobs = runner._jobs(Options(out=tmp_path, methods=METHODS), torch.device("cuda"))
    keys = [job.key for job in jobs if job.figure.largest_batch]
    assert keys == ["largest/mlp-2/mnist/0/non-private"]


def test_a_second_run_measures_what_is_missing(tiny, tmp_path):
    run(tmp_path, figures=["6"])
    run(tmp_path)
    assert len(tiny) == 4 and set(tiny[:2]) == {(B, m) for m in METHODS}
    assert len(stored(tmp_path)["runs"]) == 2
    run(tmp_path)
    assert len(tiny) == 4 and len(stored(tmp_path)["runs"]) == 2


def test_what_is_measured_survives_a_crash(tiny, tmp_path, monkeypatch):
    whole = runner.measure

    def dies(setting, *rest):
        if setting == B:
            raise KeyboardInterrupt
        return whole(setting, *rest)

    monkeypatch.setattr(runner, "measure", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert len(stored(tmp_path)["cells"]) == 2


def test_failures_are_kept_and_retried_on_request(tiny, tmp_path):
    run(tmp_path, methods=["vmap"])
    run(tmp_path, methods=["vmap"])
    assert len(tiny) == 2
    run(tmp_path, methods=["vmap"], retry=True)
    assert len(tiny) == 4
    table = (tmp_path / "results.md").read_text()
    assert "none [1]" in table and "1. out of memory" in table


def test_the_time_for_the_run_ends_it_cleanly(tiny, tmp_path):
    said = run(tmp_path, budget_seconds=1e-9)
    assert not tiny and any("the time is up: 4 cells" in line for line in said)
    assert (tmp_path / "results.md").exists()


def test_a_cell_that_the_end_cut_short_is_no_result(tiny, tmp_path, monkeypatch):
    left = iter([10.0, 10.0])
    monkeypatch.setattr(runner.Deadline, "left", lambda self: next(left, -1.0))
    run(tmp_path, methods=["vmap"])
    assert len(tiny) == 1 and not (tmp_path / "results.json").exists()


def test_results_of_other_conditions_are_not_mixed(tiny, tmp_path):
    run(tmp_path)
    with pytest.raises(ConfigurationError, match="another quick"):
        run(tmp_path, quick=True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 7}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"results\.json"):
        Results.read(tmp_path)


def test_times_must_be_positive(tmp_path):
    for name in ("budget_seconds", "cell_seconds"):
        with pytest.raises(ConfigurationError, match=name):
            Options(out=tmp_path, **{name: 0.0})


@pytest.mark.parametrize(
    "asked",
    [{"suite": "all"}, {"rows": ["mlp"]}, {"suite": "peers", "figures": ["5"]}, {"suite": "scaling", "figures": ["5"]}],
)
def test_what_belongs_to_no_suite_or_another_is_refused(tmp_path, asked):
    with pytest.raises(ConfigurationError, match="suite="):
        Options(out=tmp_path, **asked)


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="device='tpu'"):
        run(tmp_path, device="tpu")


# ---------------------------------------------------------------- rendering


def test_the_table_has_times_memory_speed_up_and_notes(tiny, tmp_path):
    run(tmp_path, methods=["reweight", "one by one"], figures=["5"])
    table = (tmp_path / "results.md").read_text()
    assert "## Tiny five" in table and "## Tiny largest\n\nNot measured." in table
    row = next(line for line in table.splitlines() if line.startswith("| mlp-2, mnist, B=4 |"))
    assert "2 (2.00x, 1 round) [1]" in row and "40 (40.00x, 1 round) [1]" in row
    assert "| mlp-2, mnist, B=4 | 20.0x |" in table  # 40 over 2
    assert "1. a slow rule" in table and "| 3 [1] |" in table


def test_a_shortened_figure_is_marked(tiny, tmp_path):
    run(tmp_path, quick=True, figures=["5"])
    assert "Shortened: 1 of 2 settings." in (tmp_path / "results.md").read_text()


def test_rendering_again_gives_the_same_files(tiny, drawn, tmp_path):
    run(tmp_path, methods=[*METHODS, "vmap"])
    files = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    assert {"results.json", "results.md", "figure-5.svg", "figure-6.svg"} == set(files)
    runner.render(tmp_path, lambda line: None)
    assert files == {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    assert len(tiny) == 6


def test_a_figure_in_which_all_failed_is_drawn_empty(tiny, drawn, tmp_path):
    run(tmp_path, methods=["vmap"], figures=["6"])
    assert (tmp_path / "figure-6.svg").exists()


def test_plots_without_matplotlib_name_the_extra(tiny, drawn, tmp_path, monkeypatch):
    run(tmp_path, figures=["6"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"clipwise-dp\[plots\]"):
        runner.render(tmp_path, lambda line: None)
    assert (tmp_path / "results.md").exists()


def test_a_folder_without_results_cannot_be_rendered(tmp_path):
    with pytest.raises(ConfigurationError, match=r"holds no results\.json"):
        runner.render(tmp_path, lambda line: None)


# ------------------------------------------------------------ command lines


@pytest.fixture
def asked(monkeypatch):
    """The options that the command line gives."""
    requests = []
    monkeypatch.setattr("benchmarks.__main__.bench", lambda options, say: requests.append(options))
    monkeypatch.setattr("benchmarks.__main__.render", lambda folder, say: requests.append(folder))
    return requests


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (
            ["--quick", "--figure", "5", "--figure", "6", "--method", "loop", "--out", "x", "--seed", "3"],
            {"quick": True, "figures": ["5", "6"], "methods": ["loop"], "out": Path("x"), "seed": 3},
        ),
        (
            ["--device", "cuda", "--budget-seconds", "9", "--cell-seconds", "5", "--retry"],
            {"device": "cuda", "budget_seconds": 9.0, "cell_seconds": 5.0, "retry": True},
        ),
        (["peers", "--row", "mlp", "--row", "cnn"], {"suite": "peers", "rows": ["mlp", "cnn"]}),
        (["scaling", "--row", "T", "--device", "cuda"], {"suite": "scaling", "rows": ["T"], "device": "cuda"}),
    ],
)
def test_the_command_line_asks_for(asked, arguments, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    (found,) = asked
    assert {name: getattr(found, name) for name in options} == options
    assert found.suite == options.get("suite", "paper")


@pytest.mark.parametrize("name", [*SUITES, *SCRIPTS])
def test_every_suite_and_script_has_options_of_its_own(name, capsys):
    assert main(["--help"]) == 0 and f"  {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0 and f"usage: python -m benchmarks {name}" in capsys.readouterr().out


def test_the_command_line_renders(asked):
    assert main(["--render", "x"]) == 0 and asked == [Path("x")]


def test_an_error_is_one_line(tmp_path, capsys):
    assert main(["--render", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_it_runs_where_only_torch_numpy_and_scipy_are():
    missing = ("dp_accounting", "typer", "rich", "matplotlib", "safetensors", "opacus")
    code = (
        f"import sys\nfor name in {missing}: sys.modules[name] = None\n"
        "from benchmarks.__main__ import main\n"
        "from benchmarks.grid import figures\nassert figures()\n"
        "from benchmarks.peers.rows import rows_for\nassert rows_for('cuda')\n"
        "from benchmarks.scaling.axes import axes_for\nassert axes_for('cuda')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_method_of_the_paper_is_there():
    assert {"non-private", "reweight", "vmap", "one by one"} <= set(all_methods())
