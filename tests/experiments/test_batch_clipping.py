"""The batch-clipping experiments: what is declared, what a run is, and how results are kept."""

import dataclasses
import json
import math

import pytest
import torch

from clipwise import data, models
from clipwise.bench.limits import Deadline
from clipwise.commands.reproduce import reproduce as command
from clipwise.errors import ConfigurationError
from clipwise.reproduce import report, runner, strategies, training, tuned
from clipwise.reproduce.figures import FIGURES, LENET
from clipwise.reproduce.pictures import pictures
from clipwise.reproduce.runner import Options, reproduce
from clipwise.reproduce.setting import Setting
from clipwise.reproduce.store import Store

CPU = torch.device("cpu")
SMALL = LENET.but(data="digits", epochs=1)
BY_NAME = {figure.name: figure for figure in FIGURES}


@pytest.fixture(scope="module", autouse=True)
def on_one_core():
    """Small tensors: several threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(setting):
    small = {"width": 4} if setting.model == "resnet18" else {}
    return models.build(setting.model, norm=setting.norm, **small)


def multiplier(row):
    return strategies.joint_multiplier(row.setting, network(row.setting))


# ------------------------------------------------------------------ the declared grid


def test_figures_4_18_and_appendix_b_come_first_and_in_full():
    assert [figure.name for figure in FIGURES[:3]] == ["4", "18", "B"]
    assert {row.setting.epochs for figure in FIGURES[:3] for row in figure.rows} == {50}
    assert set(BY_NAME) == {str(n) for n in range(1, 19)} | {"B"}


def test_what_is_shortened_says_so():
    for figure in FIGURES[3:]:
        assert all(row.setting.epochs <= 10 and row.epochs_in_paper in (10, 50) for row in figure.rows)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_private_figures_have_flat_rows_with_group_norm_at_equal_privacy(figure):
    private = [row for row in figure.rows if row.setting.is_private]
    flat = [r for r in private if r.setting.clip == "example" and r.setting.parts == "all"]
    assert bool(flat) == bool(private)
    assert all(row.setting.norm == "group" for row in flat)
    layerwise = [multiplier(r) for r in private if r.setting.parts == "enhanced"]
    for row in private:
        if "privacy" in row.label:
            z = multiplier(row)
            assert any(math.isclose(z, other, rel_tol=1e-12) for other in layerwise), row.label


def test_the_papers_settings():
    assert [row.setting.max_norm for row in BY_NAME["4"].rows[:2]] == [0.0095, 0.095]
    alc, equal_noise, equal_privacy = (row.setting for row in BY_NAME["18"].rows[:3])
    assert (alc.learning_rate, alc.decay, alc.batch_size, alc.sigma) == (0.025, 0.9, 64, 0.01875)
    assert strategies.number_of_parts(alc, network(alc)) == 62
    assert equal_noise.sigma == alc.sigma and math.isclose(equal_privacy.sigma, alc.sigma / math.sqrt(62))


def test_no_row_trains_batch_norm_by_single_examples():
    rows = [row.setting for figure in FIGURES for row in figure.rows] + list(tuned.METHODS.values())
    assert not any(setting.clip == "example" and setting.norm == "batch" for setting in rows)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Setting)])
def test_settings_that_differ_have_other_keys(field):
    usual = Setting()
    value = getattr(usual, field)
    other = "other" if isinstance(value, str) else not value if isinstance(value, bool) else 7
    assert usual.but(**{field: other}).key != usual.key


def test_every_method_has_the_same_trials():
    tried = [
        [(s.batch_size, s.noise_rate, s.epsilon) for s in tuned.trials(method, 3.0)]
        for method in tuned.METHODS
    ]
    assert all(trial == tried[0] for trial in tried) and len(tried[0]) == 8
    assert {s.sampling for s in tuned.METHODS.values()} == {"poisson"}


# ------------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def digits():
    return pictures("digits", None, CPU, judged_by="test")


def test_parts_share_no_image(digits):
    found = [{x.numpy().tobytes() for x in part.tensors[0]} for part in (digits.private, digits.public)]
    assert not found[0] & found[1] and len(digits.public) == 144 and len(digits.held_out) == 360
    assert digits.centred(digits.public.tensors[0][:2]).shape == (2, 1, 32, 32)


def test_while_settings_are_chosen_the_test_part_is_not_read(monkeypatch):
    asked = []
    original = data.images
    monkeypatch.setattr(
        data, "images", lambda name, train, folder: asked.append(train) or original(name, train)
    )
    found = pictures("digits", None, CPU, judged_by="validation")
    assert asked == [True] and len(found.held_out) == 144 and len(found.private) == 1437 - 288


@pytest.mark.parametrize("clip", ["batch", "example"])
def test_the_noise_is_the_papers(digits, clip):
    """2 C_h sigma on part h, with C_h = C for the part with the largest norm."""
    setting = SMALL.but(clip=clip, norm="group", sigma=2.5)
    torch.manual_seed(0)
    model = models.build("bn_lenet5", norm="group")
    private = training._Privately(setting, model, digits)._private
    parts = private.parts()
    assert len(parts) == 8 and private.noise_multiplier == pytest.approx(2.5 / math.sqrt(8))
    for part in parts:
        assert part.noise_std == pytest.approx(2.5 * part.sensitivity, rel=1e-6)
    assert max(part.sensitivity for part in parts) == pytest.approx(2 * 0.2, rel=1e-6)


@pytest.mark.parametrize("parts", ["all", "layerwise", "multipliers"])
def test_a_noise_rate_is_the_noise_of_an_update(digits, parts):
    """Measured: without signal, the weights move by the noise alone."""
    setting = SMALL.but(
        clip="example",
        norm="group",
        parts=parts,
        sigma=None,
        epsilon=3.0,
        noise_rate=1e-3,
        sampling="poisson",
    )
    torch.manual_seed(0)
    model = models.build("bn_lenet5", norm="group")
    trainer = training._Privately(setting.but(max_norm=1e-9), model, digits)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    for x, _y in trainer._private.loader:
        trainer._private.step((model(x) * 0).sum(1))
        break
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert float(moved.double().square().mean().sqrt()) == pytest.approx(1e-3, rel=0.02)


def test_a_run_with_batch_norm(digits):
    result = training.train(SMALL.but(sigma=0.01), digits, 0, Deadline(None))
    assert result["epsilon"] > 100 and result["steps"] == 21 and result["parts"] == 8
    assert result["parameters"] == 61_990 and len(result["public_accuracy_by_epoch"]) == 1
    assert result["accuracy"] * 360 == pytest.approx(round(result["accuracy"] * 360))


def test_a_run_without_privacy_learns_and_watches_norms(digits):
    setting = SMALL.but(
        clip="none", parts="all", sigma=None, watches_norms=True, augmented=False, learning_rate=0.2, epochs=2
    )
    result = training.train(setting, digits, 0, Deadline(None))
    assert result["accuracy"] > 0.5 and result["epsilon"] is None
    assert len(result["norms_by_epoch"]) == 2 and len(result["norms_by_epoch"][0]) == 16
    # A bias in front of batch norm has no gradient.
    weights = [norm for name, norm in result["norms_by_epoch"][1].items() if name.endswith("weight")]
    assert len(weights) == 8 and min(weights) > 0


# -------------------------------------------------------------------- results on disk


@pytest.fixture
def fake(monkeypatch):
    """Training that takes no time: accuracy is best at the second noise rate on the validation part."""
    made = []

    def train(setting, pictures, seed, deadline):
        made.append((setting, len(pictures.held_out)))
        if setting.parts == "zhang":
            raise ValueError("no such thing\nand more")
        best = setting.noise_rate == tuned.NOISE_RATES[1]
        return {
            "accuracy": 0.5 + 0.2 * best + 0.1 * seed,
            "epsilon": 2.0,
            "seconds": 0.1,
            "adjacency": "zero-out",
        }

    monkeypatch.setattr(runner, "train", train)
    return made


def said():
    lines = []
    return lines, lines.append


def test_a_second_command_runs_only_what_is_missing(tmp_path, fake):
    options = Options(tmp_path, figures=("4",), quick=True)
    reproduce(options, said()[1])
    first = len(fake)
    assert first == runner.QUICK_ROWS
    reproduce(options, said()[1])
    assert len(fake) == first
    reproduce(dataclasses.replace(options, retry=True), said()[1])
    assert len(fake) == first + 1, "only what failed"
    reproduce(dataclasses.replace(options, seeds=2), said()[1])
    assert len(fake) == 2 * first + 1


def test_figures_share_runs(tmp_path, fake):
    reproduce(Options(tmp_path, figures=("4", "18"), quick=True), said()[1])
    keys = [setting.key for setting, _ in fake]
    assert len(keys) == len(set(keys)) == 2 * runner.QUICK_ROWS - 1
    text = (tmp_path / "results.md").read_text()
    assert (
        "| BC, enhanced, C = 0.095 | 66.66% (figure 18) | 50.00 |" in text
        and "| ALC | 66.66% | 50.00 |" in text
    )


def test_a_row_that_fails_is_told_and_the_others_run(tmp_path, fake):
    store = reproduce(Options(tmp_path, figures=("4",), quick=True), said()[1])
    failed = [cell["failed"] for cell in store.cells.values() if "failed" in cell]
    assert failed == ["ValueError: no such thing"]
    assert (
        "| BC, Zhang | below enhanced | ValueError: no such thing |" in (tmp_path / "results.md").read_text()
    )


def test_settings_are_chosen_by_validation_and_tested_once_a_seed(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(runner, "QUICK_METHODS", ("IC, flat, group norm",))
    rates = tuned.NOISE_RATES
    reproduce(Options(tmp_path, figures=(tuned.NAME,), quick=True), said()[1])
    assert [(s.noise_rate, held_out) for s, held_out in fake] == [
        (rates[0], 144),
        (rates[1], 144),
        (rates[1], 360),
    ]
    assert "| IC, flat, group norm | 70.00 |" in (tmp_path / "results.md").read_text()


def test_quick_short_and_full_runs_are_not_mixed(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(runner, "pictures", lambda *a, **k: pictures("digits", None, CPU, judged_by="test"))
    reproduce(Options(tmp_path, figures=("2",), quick=True), said()[1])
    reproduce(Options(tmp_path, figures=("2",), epochs=2), said()[1])
    assert "| m = 64 | 90.24% | 50.00 | 1 | 2 of 50 |" in (tmp_path / "results.md").read_text()
    reproduce(Options(tmp_path, figures=("2",)), said()[1])
    assert "| m = 64 | 90.24% | 50.00 | 1 | 10 of 50 |" in (tmp_path / "results.md").read_text()
    assert len(fake) == 6


def test_mean_and_standard_error():
    cells = [{"accuracy": a} for a in (0.5, 0.6, 0.7)]
    assert report._accuracy(cells) == "60.00 ± 5.77"
    assert report._accuracy([{"failed": "why"}]) == "why"


def test_when_the_time_is_up_nothing_is_lost_or_made_up(tmp_path, fake):
    lines, say = said()
    store = reproduce(Options(tmp_path, figures=("B",), quick=True, budget_seconds=0), say)
    assert not store.cells and not fake and "time is up" in lines[0]
    assert "Appendix B, recomputed" in (tmp_path / "results.md").read_text()


def test_time_that_runs_out_within_a_run_leaves_no_result(digits):
    with pytest.raises(training.OutOfTimeError):
        training.train(SMALL, digits, 0, Deadline(0.0))


def test_epochs_may_be_cut_and_that_is_said(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(runner, "pictures", lambda *a, **k: pictures("digits", None, CPU, judged_by="test"))
    reproduce(Options(tmp_path, figures=("B",), epochs=3), said()[1])
    assert {setting.epochs for setting, _ in fake} == {3} and {s.data for s, _ in fake} == {"mnist"}
    assert "| 3 of 50 |" in (tmp_path / "results.md").read_text()


def test_files_name_no_folder(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(runner, "pictures", lambda *a, **k: pictures("digits", None, CPU, judged_by="test"))
    reproduce(Options(tmp_path / "out", figures=("2",), data=tmp_path), said()[1])
    for file in ("results.json", "results.md"):
        text = (tmp_path / "out" / file).read_text()
        assert str(tmp_path) not in text and "--data DIR" in text
    assert json.loads((tmp_path / "out" / "results.json").read_text())["environments"][0]["versions"]["torch"]


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"figure='19' is not known.*equal-epsilon"):
        command("batch-clipping", figure=["19"], out=tmp_path)
    with pytest.raises(ConfigurationError, match=r"paper='other' is not known.*batch-clipping"):
        command("other", out=tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="not a file of such results"):
        Store(tmp_path)


def test_a_missing_data_set_ends_the_command_and_is_no_result(tmp_path, monkeypatch):
    monkeypatch.delenv("CLIPWISE_DATA", raising=False)
    with pytest.raises(ConfigurationError, match="--data DIR"):
        reproduce(Options(tmp_path, figures=("B",)), said()[1])
    assert not (tmp_path / "results.json").exists()


def test_the_quick_mode_runs(tmp_path, monkeypatch):
    """For real, on two rows and one method."""
    monkeypatch.setattr(runner, "QUICK_FIGURES", ("B",))
    monkeypatch.setattr(runner, "QUICK_ROWS", 2)
    monkeypatch.setattr(runner, "QUICK_METHODS", ("BC, flat, batch norm",))
    command("batch-clipping", quick=True, out=tmp_path)
    cells = json.loads((tmp_path / "results.json").read_text())["cells"].values()
    assert len(cells) == 5 and not any("failed" in cell for cell in cells)
    text = (tmp_path / "results.md").read_text()
    assert "shows that everything works, and nothing else" in text
    assert "| ALC, sigma 2.5 | 50.38%, said to be 0.52-GDP |" in text and "| 2.5 | 1.513 | 1.514 |" in text
