import importlib.util
import json
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks import runner, suite
from benchmarks.graphs import compiled_steps
from benchmarks.memory import NoMemoryFigure
from benchmarks.methods import AUTO, COMPILED, GRAPHED, INDUCTOR, PLAIN_AND_NOISE, REFERENCE, REWEIGHT, steps_by
from benchmarks.networks import build, train_only
from benchmarks.options import Options
from benchmarks.peers import form, measure
from benchmarks.peers.measure import measure_row
from benchmarks.peers.rows import ON_CPU, ON_CUDA, QUICK, Row, rows_for
from benchmarks.peers.run import USUAL
from benchmarks.peers.targets import MEMORY, Target
from benchmarks.records import Results
from benchmarks.shapes import shape_of
from benchmarks.suite import chosen_columns
from benchmarks.timing import Effort
from benchmarks.workload import Setting, make_workload
from clipwise.engine.compiled import CaptureWarning
from clipwise.errors import ConfigurationError
from experiments.harness.environment import at_its_best
from experiments.harness.limits import TooSlow

CPU = torch.device("cpu")
TINY = Row("tiny", "Tiny", Setting("mlp-2", "mnist", 4), (Target(AUTO, 1.5),))
BRIEF = Effort(rounds=2, least_rounds=1, enough_seconds=0.0, cell_seconds=20.0)
COLUMNS = [REFERENCE, PLAIN_AND_NOISE, AUTO, COMPILED]


# --------------------------------------------------------------------- rows


@pytest.mark.parametrize("rows", [ON_CUDA, ON_CPU, QUICK])
def test_every_row_has_a_unique_name_a_network_and_a_target_on_clipwise(rows):
    assert len({row.name for row in rows}) == len({row.title for row in rows}) == len(rows)
    for row in rows:
        with torch.device("meta"):
            model = train_only(build(row.setting.model, shape_of(row.setting.data)), row.setting.trained)
        assert any(p.requires_grad for p in model.parameters())
        assert any(target.column == AUTO for target in row.targets)
        assert f"B={row.setting.batch}" in row.title


def test_compiled_steps_have_targets_on_cuda_alone():
    for rows, on_cuda in ((ON_CUDA, True), (ON_CPU, False)):
        for column in (COMPILED, INDUCTOR):
            assert all(any(target.column == column for target in row.targets) == on_cuda for row in rows)
        assert any(target.what == MEMORY and target.column == INDUCTOR for r in rows for target in r.targets) == on_cuda


def test_rows_in_bf16_and_with_views_train(tmp_path):
    for row in QUICK[-2:]:
        for method in (REFERENCE, AUTO):
            workload = make_workload(row.setting, CPU, 0)
            x, _ = next(workload.batches())
            assert len(x) == row.setting.batch * row.setting.views
            before = [p.detach().clone() for p in workload.model.parameters()]
            with steps_by(method, workload) as step:
                step()
            moved = [not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True)]
            assert any(moved)
        with workload.autocast():
            assert workload.model(x).dtype == (torch.bfloat16 if row.setting.bf16 else torch.float32)


def test_rows_are_chosen_by_name_in_the_order_of_the_table():
    assert [row.name for row in rows_for("cpu", wanted=["mlp", "cnn"])] == ["cnn", "mlp"]
    with pytest.raises(ConfigurationError, match="row='gpt2-256' is not known on this device"):
        rows_for("cpu", wanted=["gpt2-256"])


# ------------------------------------------------------------------ targets


def test_a_target_is_met_at_its_limit_unless_it_must_stay_below():
    assert Target(AUTO, 1.1).is_met(1.1) and not Target(AUTO, 1.1).is_met(1.1001)
    assert Target(AUTO, 1.0, below=True).is_met(0.999) and not Target(AUTO, 1.0, below=True).is_met(1.0)


def test_a_target_uses_its_own_column_and_base():
    cell = {"columns": {AUTO: {"time_over": {REFERENCE: 3.0, PLAIN_AND_NOISE: 2.0}, "memory_over": {REFERENCE: 1.5}}}}
    assert Target(AUTO, 1.0).measured(cell) == 3.0
    assert Target(AUTO, 1.0, over=PLAIN_AND_NOISE).measured(cell) == 2.0
    assert Target(AUTO, 1.0, MEMORY).measured(cell) == 1.5
    assert Target(COMPILED, 1.0).measured(cell) is None
    assert Target(AUTO, 1.0).measured({"failed": "no"}) is None


# --------------------------------------------------------------------- form


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, ("sgd-foreach", False)),
        ({("sgd-foreach", True): 0.5, ("sgd-fused", True): 0.4}, ("sgd-fused", True)),
        ({("sgd-foreach", True): 0.995}, ("sgd-foreach", False)),  # a tie goes to the usual form
        ({("sgd-foreach", True): 2.0, ("sgd-fused", False): 0.9}, ("sgd-fused", False)),
    ],
)
def test_the_form_is_that_of_the_fastest_plain_step(monkeypatch, seconds, expected):
    now = [0.0]
    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(form, "make_workload", lambda setting, device, seed: setting)

    @contextmanager
    def steps(method, setting):
        assert method == REFERENCE

        def step():
            now[0] += seconds.get((setting.optimizer, setting.channels_last), 1.0)

        yield step

    monkeypatch.setattr(form, "steps_by", steps)
    found = form.fastest_form(Setting("cnn", "mnist", 4), CPU, 0)
    assert (found.optimizer, found.channels_last) == expected


def test_without_convolutions_there_is_one_layout(monkeypatch):
    asked = []
    monkeypatch.setattr(form, "_fastest", lambda settings, *_: asked.append(settings) or settings[-1])
    form.fastest_form(Setting("mlp-2", "mnist", 4), CPU, 0)
    assert not any(setting.channels_last for settings in asked for setting in settings)


# ---------------------------------------------------------------- measuring


@pytest.fixture
def light(monkeypatch):
    """No processes for memory, no choice of the form."""
    monkeypatch.setattr(measure, "peak_memory", lambda setting, name, *_: 100 if name == REFERENCE else 150)
    monkeypatch.setattr(measure, "fastest_form", lambda setting, *_: setting)


def row_of(columns=COLUMNS):
    return measure_row(TINY, columns, CPU, 0, BRIEF, 60.0)


def test_a_row_has_figures_of_every_column_or_the_reason_why_not(light):
    cell = row_of()
    columns = cell["columns"]
    assert columns[COMPILED] == {"failed": "needs CUDA graphs"}
    assert columns[REFERENCE]["ratio"] == 1.0
    assert set(columns[AUTO]["time_over"]) == {REFERENCE, PLAIN_AND_NOISE}
    assert columns[AUTO]["time_over"][REFERENCE] == columns[AUTO]["ratio"] > 0
    assert columns[AUTO]["memory_over"] == {REFERENCE: 1.5}
    assert cell["optimizer"] == "adam" and "failed" not in cell


def failing(monkeypatch, name, error, *, late=False):
    """`name` fails when it is set up, or in its first step."""

    @contextmanager
    def steps(method, workload):
        def fail():
            raise error

        if method == name and not late:
            fail()
        with steps_by(method, workload) as step:
            yield fail if method == name else step

    monkeypatch.setattr(measure, "steps_by", steps)


@pytest.mark.parametrize("late", [False, True])
def test_a_column_that_fails_does_not_take_the_others_with_it(light, monkeypatch, late):
    failing(monkeypatch, AUTO, ValueError("odd"), late=late)
    columns = row_of()["columns"]
    assert columns[AUTO] == {"failed": "ValueError: odd"}
    assert columns[PLAIN_AND_NOISE]["ratio"] > 0


def test_a_column_without_memory_is_not_timed(light, monkeypatch):
    def peak(setting, name, *_):
        if name == AUTO:
            raise NoMemoryFigure("killed")
        return 100

    monkeypatch.setattr(measure, "peak_memory", peak)
    assert row_of()["columns"][AUTO] == {"failed": "killed"}


@pytest.mark.parametrize(("name", "error"), [(REFERENCE, ValueError("odd")), (AUTO, TooSlow("too slow"))])
def test_without_plain_training_or_time_there_is_no_row(light, monkeypatch, name, error):
    failing(monkeypatch, name, error)
    cell = row_of()
    assert str(error) in cell["failed"] and "columns" not in cell


class Compiled:
    """Takes the place of a private run."""

    loader = ((torch.ones(1, 2), torch.zeros(1)), (torch.ones(2, 2), torch.zeros(2)))

    def __init__(self, replay):
        self.replay = replay

    def compiled(self, loss, backend):
        assert callable(loss) and backend == "cudagraphs"
        return self.replay


def test_compiled_steps_replay_every_batch_of_the_loader():
    replayed = []
    run = Compiled(lambda x, y: replayed.append((len(x), len(y))))
    step = compiled_steps(make_workload(TINY.setting, CPU, 0), run, settling=1)
    for _ in range(3):
        step()
    assert replayed == [(1, 1), (2, 2), (1, 1)]


def test_steps_that_could_not_be_captured_are_no_compiled_steps():
    run = Compiled(lambda x, y: warnings.warn("no graph", CaptureWarning, stacklevel=1))
    step = compiled_steps(make_workload(TINY.setting, CPU, 0), run, settling=1)
    with pytest.raises(CaptureWarning, match="no graph"):
        step()


def test_a_compiled_step_trains():
    """On the CPU it is an ordinary step: what a column needs from `private.compiled` is there."""
    workload = make_workload(TINY.setting, CPU, 0)
    before = [p.detach().clone() for p in workload.model.parameters()]
    with steps_by(COMPILED, workload) as step:
        step()
    after = workload.model.parameters()
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_settings_for_speed_hold_inside_and_end_there():
    def now():
        cudnn = torch.backends.cudnn
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark

    before = now()
    with pytest.raises(KeyError), at_its_best(torch.device("cuda")):
        assert now() == ("high", True, True)
        raise KeyError
    assert now() == before
    with at_its_best(CPU):
        assert now() == before


# ------------------------------------------------------------------ running


settings = []  # of the measurements of `made`


@pytest.fixture
def made(monkeypatch):
    """Measurements that take no time; gives the list of those made."""
    calls = []
    settings.clear()

    def fake(row, columns, device, seed, effort, most_seconds):
        calls.append((row.name, columns))
        settings.append(row.setting)
        cell = {"row": row.name, "setting": row.setting.key, "optimizer": "sgd-fused", "channels_last": False}
        cell["columns"] = {}
        for number, name in enumerate(columns):
            ratio = 1.0 + number / 8
            cell["columns"][name] = {
                "seconds": ratio / 1000,
                "ratio": ratio,
                "rounds": 5,
                "peak_bytes": 2**21,
                "time_over": {REFERENCE: ratio, PLAIN_AND_NOISE: ratio, GRAPHED: ratio},
                "memory_over": {REFERENCE: 1.0},
            }
        cell["columns"][columns[-1]] = {"failed": "out of memory"}
        return cell

    monkeypatch.setattr(suite, "measure_row", fake)
    return calls


def peers(folder, **options):
    said = []
    runner.bench(Options(out=folder, suite="peers", **({"quick": True} | options)), said.append)
    return said


def table_of(folder):
    return (folder / "results.md").read_text()


def test_rows_are_measured_once_and_the_table_is_printed(made, tmp_path):
    said = peers(tmp_path)
    assert [name for name, _ in made] == [row.name for row in QUICK]
    assert made[0][1] == chosen_columns([], USUAL)
    assert any(table_of(tmp_path) in line for line in said)
    peers(tmp_path)
    assert len(made) == len(QUICK)


def test_new_columns_and_failures_are_measured_on_request(made, tmp_path):
    peers(tmp_path, rows=["mlp"], methods=[AUTO, REWEIGHT])
    peers(tmp_path, rows=["mlp"], methods=[AUTO])
    assert len(made) == 1
    peers(tmp_path, rows=["mlp"], methods=[PLAIN_AND_NOISE, AUTO])
    assert made[-1] == ("mlp", [REFERENCE, PLAIN_AND_NOISE, AUTO]) and len(made) == 2
    peers(tmp_path, rows=["mlp"], methods=[REWEIGHT], retry=True)  # the last column of each measurement fails
    assert len(made) == 3
    peers(tmp_path, rows=["mlp"], methods=["opacus ghost"])
    assert made[-1] == ("mlp", [REFERENCE, "opacus ghost"])  # beside plain training again
    assert set(Results.read(tmp_path).cells["mlp"]["columns"]) == {
        REFERENCE, PLAIN_AND_NOISE, AUTO, REWEIGHT, "opacus ghost"
    }  # fmt: skip


def test_columns_that_are_added_are_measured_in_the_same_form(made, tmp_path):
    peers(tmp_path, rows=["mlp"], methods=[AUTO])
    before = Results.read(tmp_path).cells["mlp"]["columns"][REFERENCE]
    peers(tmp_path, rows=["mlp"], methods=[AUTO, REWEIGHT])
    assert made[-1] == ("mlp", [REFERENCE, AUTO, REWEIGHT])
    assert settings[-1].optimizer == "sgd-fused"
    assert form.fastest_form(settings[-1], CPU, 0) is settings[-1]
    assert Results.read(tmp_path).cells["mlp"]["columns"][REFERENCE] == before


def test_what_cannot_run_here_is_not_tried_again(made, tmp_path):
    peers(tmp_path, rows=["mlp"], methods=[AUTO, COMPILED])
    peers(tmp_path, rows=["mlp"], methods=[AUTO, COMPILED], retry=True)
    assert len(made) == 1


def test_the_table_is_on_disk_after_each_row(made, tmp_path, monkeypatch):
    whole = suite.measure_row

    def dies(row, *rest):
        if row is QUICK[1]:
            raise KeyboardInterrupt
        return whole(row, *rest)

    monkeypatch.setattr(suite, "measure_row", dies)
    with pytest.raises(KeyboardInterrupt):
        peers(tmp_path)
    assert QUICK[0].title in table_of(tmp_path)
    assert f"Shortened: 1 of {len(QUICK)} rows." in table_of(tmp_path)


def test_the_time_for_the_run_ends_it_cleanly(made, tmp_path):
    said = peers(tmp_path, budget_seconds=1e-9)
    assert not made and any(f"the time is up: {len(QUICK)} rows" in line for line in said)


def test_the_table_has_ratios_targets_and_reasons(made, tmp_path):
    peers(tmp_path, rows=["mlp"], methods=[PLAIN_AND_NOISE, AUTO, REWEIGHT])
    costs, targets = (line for line in table_of(tmp_path).splitlines() if line.startswith(f"| {QUICK[0].title} |"))
    assert costs.endswith("| 1 / 2 | 1.12 / 1.00 | 1.25 / 1.00 | none [1] |")
    (limit,) = {target.most for target in QUICK[0].targets if target.column == AUTO}
    verdict = "met" if limit >= 1.25 else "**not met**"
    assert f"<= {limit:.2f}: {verdict} (1.250)" in targets and "not measured" in targets
    assert "1. out of memory" in table_of(tmp_path)


def test_compiled_steps_are_compared_with_graphed_plain_ones(made, tmp_path):
    peers(tmp_path, rows=["mlp"], methods=[COMPILED, GRAPHED, REWEIGHT])
    assert "compiled over graphed" in table_of(tmp_path)


def test_a_row_that_failed_is_shown_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "measure_row", lambda row, *_: {"row": row.name, "failed": "no luck"})
    said = peers(tmp_path, rows=["mlp"])
    assert any("no luck" in line for line in said)
    assert "1. no luck" in table_of(tmp_path)


def test_rendering_again_gives_the_same_table(made, tmp_path):
    peers(tmp_path)
    before = table_of(tmp_path)
    (tmp_path / "results.md").unlink()
    runner.render(tmp_path, lambda line: None)
    assert table_of(tmp_path) == before


def test_a_folder_has_one_suite(made, tmp_path):
    peers(tmp_path)
    with pytest.raises(ConfigurationError, match="another suite"):
        runner.bench(Options(out=tmp_path, quick=True), lambda line: None)


def test_columns_are_chosen_by_name():
    assert chosen_columns(["opacus ghost", AUTO], USUAL) == [REFERENCE, AUTO, "opacus ghost"]
    with pytest.raises(ConfigurationError, match="method='loop' is no column"):
        chosen_columns(["loop"], USUAL)


# ------------------------------------------------- plain training without us


@pytest.fixture
def plain():
    file = Path(__file__).parents[2] / "benchmarks" / "plain.py"
    spec = importlib.util.spec_from_file_location("plain", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.name)
def test_both_baselines_train_the_same(plain, row, monkeypatch):
    models = []
    build_one = plain.build
    monkeypatch.setattr(plain, "build", lambda *args: models.append(build_one(*args)) or models[-1])
    plain.trainer(row, CPU, {"foreach": True}, False)()
    setting = Setting(row.setting.model, row.setting.data, row.setting.batch, row.setting.trained, "sgd-foreach")
    workload = make_workload(setting, CPU, 0)
    with steps_by(REFERENCE, workload) as step:
        step()
    for mine, theirs in zip(workload.model.parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("seconds", "code"), [(1.029, 0), (1.031, 1), (0.969, 1), (None, 0)])
def test_the_baseline_is_compared(plain, monkeypatch, tmp_path, capsys, seconds, code):
    monkeypatch.setattr(plain, "fastest", lambda row, device: (1000.0, "fused"))
    columns = {} if seconds is None else {REFERENCE: {"seconds": seconds}}
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"cells": {"mlp": {"columns": columns}}}))
    assert plain.main(["--quick", "--row", "mlp", "--compare", str(file)]) == code
    assert "1000.000 ms" in capsys.readouterr().out
