"""The normalization experiments: what is declared, what a run is, how the best trial is taken, what is concluded."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from clipwise import data
from clipwise.bench.limits import Deadline
from clipwise.commands.reproduce import reproduce as command
from clipwise.errors import ConfigurationError
from clipwise.layers import PublicBatchNorm
from clipwise.reproduce.normalization import report, runner, sets, speed
from clipwise.reproduce.normalization.__main__ import main
from clipwise.reproduce.normalization.claims import number
from clipwise.reproduce.normalization.findings import findings, verdict
from clipwise.reproduce.normalization.measured import Measured, measured
from clipwise.reproduce.normalization.networks import network
from clipwise.reproduce.normalization.results import best_of, key_of, results
from clipwise.reproduce.normalization.runner import Entry, Options, needed, reproduce
from clipwise.reproduce.normalization.setting import Setting
from clipwise.reproduce.normalization.tables import TABLES, Table, quick
from clipwise.reproduce.normalization.workers import Task, run
from clipwise.reproduce.store import Store

CPU = torch.device("cpu")
BY_NAME = {table.name: table for table in TABLES}
TINY = Setting(data="digits", model="lenet_300_100", epochs=1, batch_size=256)
SMALL = Table(
    "5",
    "Small",
    over="epsilon",
    values=(8.0,),
    families={"net": TINY},
    methods={"no norm": {"norm": "none"}, "public": {"norm": "public"}},
    trials=({"learning_rate": 1.0}, {"learning_rate": 2.0}),
    seeds=2,
)


@pytest.fixture(scope="module", autouse=True)
def on_one_core():
    """Small tensors: several threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path)
    found.begin("a command", {"cpu": "a machine"})
    return found


def keep(store, task, **cell):
    store.add(key_of(*task), {"setting": task.setting.key, "judged_by": task.judged_by, **cell})


# ------------------------------------------------------------------ the declared grid


def test_tables_2_to_7_are_there_and_the_two_that_matter_come_first():
    assert [table.name for table in TABLES[:2]] == ["5", "2"]
    assert {table.name for table in TABLES} == {"2", "3", "4", "5", "6", "7", "6-scratch"}
    for table in TABLES:
        assert bool(table.shortened) == (table.name not in ("2", "5")), table.name


def test_tables_2_and_5_are_in_full():
    assert BY_NAME["2"].values == (0.0, 0.01, 0.1, 0.3, 1.0, 2.0, 10.0) and BY_NAME["2"].seeds >= 5
    assert BY_NAME["5"].values == (7.0, 3.0, 1.0, 0.5, 0.1, 0.05) and BY_NAME["5"].seeds >= 5
    assert {"no norm", "layer norm", "group norm", "public", "self+public", "public-exact"} <= set(
        BY_NAME["5"].methods
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_method_has_the_same_trials(table):
    def tried(family, method):
        settings = table.tried(family, method, table.values[0])
        return [(s.learning_rate, s.epochs, s.batch_size) for s in settings]

    for family in table.families:
        assert len({tuple(tried(family, method)) for method in table.methods}) == 1


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_no_private_row_has_statistics_of_a_batch_and_group_norm_is_a_row(table):
    norms = [changes["norm"] for changes in table.methods.values()]
    assert not (table.over == "epsilon" and "batch" in norms)
    assert table.over == "noise" or "group" in norms


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_claims_are_numbers_of_families_that_are_run(table):
    for (family, _), claims in table.claims.items():
        assert family in table.families or family.startswith("light VGG")
        assert all(claim == "fails" or 0 < number(claim) < 100 for claim in claims.values())


def test_the_papers_gain_of_batch_norm():
    claims = BY_NAME["5"].claims
    assert number(claims["LeNet-5", "batch norm"][1.0]) - number(claims["LeNet-5", "no norm"][1.0]) == 3.5


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Setting)])
def test_settings_that_differ_have_other_keys(field):
    usual = Setting()
    value = getattr(usual, field)
    other = "other" if isinstance(value, str) else not value if isinstance(value, bool) else 7
    assert usual.but(**{field: other}).key != usual.key


# ------------------------------------------------------------------------------- data


def rows_of(part):
    return {x.numpy().tobytes() for x in part.tensors[0]}


def test_parts_share_no_record():
    found = sets.load("digits", 28, None, CPU, judged_by="test", trains_on_all=False)
    parts = [rows_of(part) for part in (found.train, found.validation, found.public)]
    assert all(parts) and not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    assert found.train.tensors[0].shape[1:] == (1, 28, 28)


def test_the_final_run_takes_the_validation_part_and_never_the_public_one():
    apart, all_of_it = (
        sets.load("digits", 28, None, CPU, judged_by="test", trains_on_all=flag) for flag in (False, True)
    )
    assert rows_of(all_of_it.train) == rows_of(apart.train) | rows_of(apart.validation)
    assert len(all_of_it.validation) == 0 and rows_of(all_of_it.public) == rows_of(apart.public)


def test_public_rows_are_public():
    found = sets.load("digits", 28, None, CPU, judged_by="test", trains_on_all=True)
    rows = sets.public_rows("digits", 28, None, CPU)
    assert len(rows) == 128 and {x.numpy().tobytes() for x in rows} <= rows_of(found.public)


def test_while_settings_are_chosen_the_test_part_is_not_read(monkeypatch):
    asked, original = [], data.images
    monkeypatch.setattr(
        data, "images", lambda name, train, folder: asked.append(train) or original(name, train)
    )
    found = sets.load("digits", 28, None, CPU, judged_by="validation", trains_on_all=True)
    assert asked == [True] and found.held_out is not None and len(found.held_out) == 144
    assert not rows_of(found.train) & rows_of(found.held_out)


def test_large_images_are_cut_to_their_middle(monkeypatch):
    from torch.utils.data import TensorDataset

    x = torch.arange(32.0).expand(20, 3, 32, 32)
    monkeypatch.setattr(data, "images", lambda *_: TensorDataset(x, torch.zeros(20).long()))
    found = sets.load("cifar10", 24, None, CPU, judged_by="test", trains_on_all=True)
    assert found.train.tensors[0].shape[1:] == (3, 24, 24)
    assert torch.equal(
        found.train.tensors[0][:1, :, :1, :1], data.look("cifar10").standardised(x[:1, :, :1, 4:5])
    )


# ------------------------------------------------------------------------------ a run


@pytest.mark.parametrize("norm", ["none", "layer", "group", "public", "self+public", "public-exact"])
def test_a_private_run_spends_its_budget(norm):
    setting = TINY.but(norm=norm, epsilon=8.0, learning_rate=1.0)
    cell = run(Task(setting, "test", 0), None, "cpu", Deadline(None))
    assert 7.9 < cell["epsilon"] <= 8 and cell["adjacency"] == "zero-out" and 0 <= cell["accuracy"] <= 1


def test_batch_norm_cannot_be_trained_privately():
    setting = TINY.but(norm="batch", epsilon=8.0)
    assert run(Task(setting, "test", 0), None, "cpu", Deadline(None))["failed"].startswith("refused")


def test_training_without_privacy_learns_and_notes_every_epoch():
    setting = TINY.but(norm="batch", epochs=4, learning_rate=1e-2, noise=0.01)
    cell = run(Task(setting, "test", 0), None, "cpu", Deadline(None))
    assert cell["accuracy"] > 0.8 and cell["epsilon"] is None
    assert len(cell["validation_accuracy_by_epoch"]) == 4


def test_when_the_time_is_up_there_is_no_result():
    assert run(Task(TINY, "test", 0), None, "cpu", Deadline(0.0)) is None


def network_of(setting, public):
    rows = sets.public_rows("digits", setting.side, None, CPU) if setting.needs_public_rows else None
    return network(setting, 0, 1, 10, public, rows)


def test_pretrained_convolutions_stay_and_linear_layers_are_fresh(monkeypatch):
    monkeypatch.setattr("clipwise.reproduce.normalization.networks.PRETRAINING_EPOCHS", 1)
    public = sets.load("digits", 32, None, CPU, judged_by="test", trains_on_all=True).public
    setting = Setting(data="digits", model="light_vgg", width=4, norm="public-exact", epsilon=8.0)
    plain, pretrained = (network_of(setting.but(pretrained=flag), public) for flag in (False, True))
    layers = list(zip(plain, pretrained, strict=True))
    for one, two in layers:
        if isinstance(one, nn.Conv2d):
            assert not torch.equal(one.weight, two.weight) and not two.weight.requires_grad
        if isinstance(one, nn.Linear):
            assert torch.equal(one.weight, two.weight) and two.weight.requires_grad
    assert all(two.weight.requires_grad for _, two in layers if isinstance(two, PublicBatchNorm))


# ---------------------------------------------------------------- trials, then tested runs


ENTRY = Entry(SMALL, "net", "no norm", 8.0)


def test_trials_come_first_then_the_best_of_them_is_tested(store):
    trials = needed(ENTRY, store, 2)
    assert [(task.setting.learning_rate, task.judged_by) for task in trials] == [
        (1.0, "validation"),
        (2.0, "validation"),
    ]
    keep(store, trials[0], accuracy=0.5)
    assert needed(ENTRY, store, 2) == trials[1:]
    keep(store, trials[1], accuracy=0.6)
    tested = needed(ENTRY, store, 2)
    assert [(task.setting.learning_rate, task.judged_by, task.seed) for task in tested] == [
        (2.0, "test", 0),
        (2.0, "test", 1),
    ]
    for task in tested:
        keep(store, task, accuracy=0.55)
    assert needed(ENTRY, store, 2) == []
    assert len(results(SMALL, store)["net", "no norm", 8.0]) == 2


def test_what_failed_is_a_result_until_it_is_asked_for_again(store):
    for task in needed(ENTRY, store, 2):
        keep(store, task, failed="refused: so")
    assert needed(ENTRY, store, 2) == [] and len(needed(ENTRY, store, 2, set(store.cells))) == 2
    assert results(SMALL, store)["net", "no norm", 8.0][0]["failed"] == "refused: so"


def test_an_entry_shows_nothing_before_its_trials_are_complete(store):
    first, second = needed(ENTRY, store, 2)
    keep(store, first, accuracy=0.5)
    keep(store, first._replace(judged_by="test"), accuracy=0.5)
    assert results(SMALL, store) == {}
    keep(store, second, accuracy=0.1)
    assert len(results(SMALL, store)["net", "no norm", 8.0]) == 1


def test_the_first_of_equal_trials_is_taken():
    assert best_of([{"accuracy": 0.5}, {"accuracy": 0.5}, {"failed": "x"}]) == 0
    assert best_of([{"failed": "x"}, {"accuracy": 0.1}]) == 1
    assert best_of([{"failed": "x"}]) is None


# ------------------------------------------------------------------------ what is concluded


def test_mean_and_standard_error():
    found = measured([{"accuracy": 0.9}, {"accuracy": 0.94}, {"failed": "x"}])
    assert found.mean == pytest.approx(92) and found.error == pytest.approx(2)
    assert measured([{"accuracy": 0.9}]).error is None and measured([]) is None
    assert (Measured(5, 3) - Measured(1, 4)).error == 5


@pytest.mark.parametrize(
    ("mean", "error", "claim", "words"),
    [
        (4.0, 0.5, 3.5, "the gain survives in full"),
        (3.0, 0.5, 3.5, "the gain survives in full"),
        (2.0, 0.5, 3.5, "the gain survives in part"),
        (0.9, 0.5, 3.5, "no clear difference"),
        (-1.1, 0.5, 3.5, "a loss"),
        (2.0, 0.5, None, "a gain"),
        (2.0, 0.5, -1.0, "a gain"),
        (2.0, None, 3.5, "one seed, so no verdict"),
    ],
)
def test_verdicts_come_from_numbers(mean, error, claim, words):
    assert verdict(Measured(mean, error), claim) == words


def runs(*accuracies):
    return [{"accuracy": value} for value in accuracies]


def test_private_findings_name_the_claim():
    found = {
        ("LeNet-5", "no norm", 1.0): runs(0.90, 0.91),
        ("LeNet-5", "public-exact", 1.0): runs(0.95, 0.96),
        ("LeNet-5", "group norm", 1.0): runs(0.96, 0.97),
    }
    told = "\n".join(findings(BY_NAME["5"], found))
    assert (
        "public-exact against no norm: the gain survives in full at epsilon 1 (+5.00 ± 0.71, paper +3.50)"
        in told
    )
    assert "public-exact against group norm: -1.00 ± 0.71 at epsilon 1" in told


def test_noise_findings_say_how_much_is_borne():
    found = {
        ("LeNet-5", "batch norm", noise): runs(accuracy)
        for noise, accuracy in ((0.0, 0.99), (0.1, 0.985), (1.0, 0.97), (2.0, 0.985))
    }
    (told,) = findings(BY_NAME["2"], found)
    assert "keeps 99.00 within 1 point up to noise 0.1, and 98.50 is left at noise 2" in told
    assert "the paper says keeps 99.20 within 1 point up to noise 2" in told


def test_speed_is_epochs_until_near_the_noiseless_accuracy_at_one_rate(store):
    table, curve = BY_NAME["2"], "validation_accuracy_by_epoch"
    for noise, trial, accuracies in (
        (0.0, 0, [0.9, 0.99]),
        (0.0, 1, [0.98, 0.985]),
        (1.0, 1, [0.5, 0.98]),
        (10.0, 1, [0.1, 0.2]),
    ):
        setting = table.tried("LeNet-5", "batch norm", noise)[trial]
        keep(store, Task(setting, "validation", 0), **{curve: accuracies})
    told = "\n".join(speed.lines(table, store))
    assert "rate 0.001 | 2 | not run |" in told
    assert "rate 0.01 | 1 | not run | not run | not run | 2 | not run | not in 2 |" in told
    assert "rate 0.01: noise 10 does not get there" in told


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def one_table(monkeypatch):
    """The command with one small table in place of all, on digits."""
    monkeypatch.setattr(runner, "TABLES", (SMALL,))
    monkeypatch.setattr("clipwise.reproduce.normalization.results.TABLES", (SMALL,))
    monkeypatch.setattr(report, "FIGURE_1", {})


def test_it_runs_goes_on_and_ends(one_table, tmp_path, capsys):
    assert main(["--table", "5", "--out", str(tmp_path), "--budget-seconds", "0"]) == 0
    assert "the time is up" in capsys.readouterr().out and not (tmp_path / "results.json").exists()
    assert main(["--table", "5", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("seed") == 8  # two methods: two trials, two tested runs
    assert main(["--table", "5", "--out", str(tmp_path), "--seeds", "3"]) == 0
    assert capsys.readouterr().out.count("seed") == 2  # the third seed of each, and nothing again
    text = (tmp_path / "results.md").read_text()
    assert "net, public against no norm" in text and "± " in text and "not run" not in text


def test_several_processes_give_the_same_grid(one_table, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "TABLES", (dataclasses.replace(SMALL, trials=SMALL.trials[:1], seeds=1),))
    found = reproduce(Options(tmp_path, workers=2), lambda _: None)
    assert len(found.cells) == 2 and not any("failed" in cell for cell in found.cells.values())
    assert json.loads((tmp_path / "results.json").read_text())["cells"].keys() == found.cells.keys()


def test_a_missing_data_set_ends_the_command_and_is_no_result(tmp_path, monkeypatch):
    monkeypatch.delenv("CLIPWISE_DATA", raising=False)
    with pytest.raises(ConfigurationError, match="--data DIR"):
        command("normalization", table=["5"], out=tmp_path)
    assert not (tmp_path / "results.json").exists()


def test_wrong_arguments_are_named(tmp_path, capsys):
    with pytest.raises(ConfigurationError, match=r"table='8' is not known.*6-scratch"):
        command("normalization", table=["8"], out=tmp_path)
    with pytest.raises(ConfigurationError, match="figure 1 alone"):
        command("normalization", figure=["2"], out=tmp_path)
    with pytest.raises(ConfigurationError, match="--table and --workers are for normalization"):
        command("batch-clipping", table=["5"], out=tmp_path)
    with pytest.raises(ConfigurationError, match="--epochs is for batch-clipping"):
        command("normalization", epochs=1, out=tmp_path)
    assert main(["--workers", "0", "--quick", "--out", str(tmp_path)]) == 2
    assert "workers=0 is not possible" in capsys.readouterr().err


def test_quick_needs_no_data_and_every_table_has_a_quick_form():
    for table in map(quick, TABLES):
        assert len(table.values) == 1 and table.seeds == 1
        assert {s.data for s in table.families.values()} <= {"digits", sets.MADE_UP}


def test_figure_1_takes_its_columns_alone():
    entries = list(runner._entries(Options("out", figures=("1",))))
    assert {entry.table.name for entry in entries} == {"2", "3"}
    assert {entry.method for entry in entries} == {"batch norm"}
