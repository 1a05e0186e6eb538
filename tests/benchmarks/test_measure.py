import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import methods, timing
from benchmarks import workload as workload_module
from benchmarks.cell import measure
from benchmarks.largest import largest
from benchmarks.memory import NoMemoryFigure, peak_memory
from benchmarks.methods import all_methods, available_methods, steps_by
from benchmarks.timing import Contender, Effort, interleave, settled
from benchmarks.workload import Setting, make_workload
from clipwise.errors import ConfigurationError
from experiments.harness.limits import Deadline, TooSlow, reason_of, time_limit

CPU = torch.device("cpu")
SMALL = Setting("mlp-2", "mnist", 4)
BRIEF = Effort(rounds=1, least_rounds=1, enough_seconds=0.0, cell_seconds=60.0)


class Clock:
    """A clock that only acts move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def act(self, *seconds):
        """Each call takes the next value of `seconds`; further calls take the last one."""
        left = list(seconds)

        def act():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return act


def no_wait():
    pass


def timed(step, reference, effort):
    acts = {"step": step, "reference": reference}
    contenders = {name: settled(act, 2, effort.cell_seconds / 4, no_wait) for name, act in acts.items()}
    return interleave(contenders, effort, no_wait).timing("step", "reference")


# ------------------------------------------------------------------ methods


@pytest.mark.parametrize("method", all_methods())
def test_a_step_of_every_method_moves_the_parameters(method):
    if method not in available_methods():
        pytest.skip("Opacus is not installed")
    workload = make_workload(SMALL, CPU, 0)
    before = [p.detach().clone() for p in workload.model.parameters()]
    with steps_by(method, workload) as step:
        step()
    after = list(workload.model.parameters())
    assert all(not torch.equal(a, b.detach()) for a, b in zip(before, after, strict=True))
    assert all(torch.isfinite(b).all() for b in after)


def test_non_private_plus_noise_has_noise_and_the_reference_has_none():
    def trained(method):
        workload = make_workload(SMALL, CPU, 0)
        with steps_by(method, workload) as step:
            step()
        return torch.cat([p.detach().flatten() for p in workload.model.parameters()])

    assert torch.equal(trained("non-private"), trained("non-private"))
    assert not torch.equal(trained("non-private + noise"), trained("non-private + noise"))


def test_one_by_one_clips_each_example_by_its_own_norm(monkeypatch):
    """Against `PerExample`, without noise: Adam's first step shows signs alone, so gradients are compared."""
    monkeypatch.setattr(methods, "NOISE_MULTIPLIER", 0.0)
    monkeypatch.setattr(methods, "MAX_NORM", 0.5)
    monkeypatch.setattr(workload_module, "BATCHES", 1)  # one batch, so that all draw the same
    gradients = []
    for method in ("one by one", "bookkeeping", "auto"):
        workload = make_workload(SMALL, CPU, 0)
        with steps_by(method, workload) as step:
            step()
        gradients.append(torch.cat([p.grad.flatten() for p in workload.model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("channels_last", [False, True])
def test_non_private_plus_noise_without_noise_is_plain_training(monkeypatch, channels_last):
    monkeypatch.setattr(methods, "NOISE_MULTIPLIER", 0.0)
    trained = []
    for method in ("non-private", "non-private + noise"):
        setting = Setting("cnn", "mnist", 4, optimizer="sgd-foreach", channels_last=channels_last)
        workload = make_workload(setting, CPU, 0)
        with steps_by(method, workload) as step:
            step()
        trained.append(torch.cat([p.detach().flatten() for p in workload.model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1])


def test_an_unknown_method_is_refused():
    with pytest.raises(ConfigurationError, match="method='magic' is not known"):
        available_methods(["magic"])


# ------------------------------------------------------------------- timing


def test_medians_and_ratio_leave_out_the_warm_up(monkeypatch):
    clock = Clock(monkeypatch)
    step, reference = clock.act(50.0, 40.0, 3.0), clock.act(9.0, 1.0)
    found = timed(step, reference, Effort(5, cell_seconds=1e6, enough_seconds=1e6))
    assert (found.seconds, found.reference_seconds, found.ratio) == (3.0, 1.0, 3.0)
    assert found.rounds == 5


def test_the_ratio_compares_within_a_round(monkeypatch):
    clock = Clock(monkeypatch)
    slow = [1.0, 1.0, 2.0, 20.0, 4.0], [1.0, 1.0, 1.0, 10.0, 2.0]  # the machine is slower in some rounds
    effort = Effort(3, cell_seconds=1e6, enough_seconds=1e6)
    assert timed(clock.act(*slow[0]), clock.act(*slow[1]), effort).ratio == 2.0


def test_several_contenders_take_turns_and_any_two_compare(monkeypatch):
    clock, turns = Clock(monkeypatch), []

    def act(name, *seconds):
        once = clock.act(*seconds)
        return lambda: (turns.append(name), once())

    # A machine that is ten times slower in the second round: medians of times say nothing about a and b.
    acts = {"a": act("a", 2.0, 20.0, 9.0), "b": act("b", 1.0, 10.0, 1.0), "c": act("c", 4.0, 40.0, 4.0)}
    contenders = {name: Contender(one, 1) for name, one in acts.items()}
    rounds = interleave(contenders, Effort(3, cell_seconds=1e6, enough_seconds=1e6), no_wait)
    assert turns == ["a", "b", "c"] * 3
    assert rounds.ratio("a", "b") == 2.0 and rounds.ratio("a", "c") == 0.5 and rounds.ratio("c", "b") == 4.0


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, 3), (30.0, 1), (1000.0, 1)])
def test_rounds_end_with_the_time_of_the_cell(monkeypatch, seconds, rounds):
    clock = Clock(monkeypatch)
    effort = Effort(rounds=15, least_rounds=3, enough_seconds=2.0, cell_seconds=60.0)
    assert timed(clock.act(seconds), clock.act(0.1), effort).rounds == rounds


def test_short_steps_are_timed_in_blocks(monkeypatch):
    clock, calls = Clock(monkeypatch), []
    act = clock.act(0.001)

    def step():
        calls.append(1)
        act()

    found = timed(step, clock.act(0.5), Effort(2, cell_seconds=1e6, enough_seconds=1e6))
    assert len(calls) > 2 * 10
    assert found.seconds == pytest.approx(0.001)


# ------------------------------------------------------------------- limits


def test_a_limit_stops_what_is_too_slow():
    with pytest.raises(TooSlow, match="took longer than"), time_limit(0.05):
        for _ in range(100):
            time.sleep(0.05)
    time.sleep(0.06)  # the alarm is off afterwards


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out of memory"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ConfigurationError("no.\nmore"), "refused: no."),
        (ValueError("odd"), "ValueError: odd"),
        (ValueError(), "ValueError: "),
    ],
)
def test_reasons_are_one_line(error, reason):
    assert reason_of(error) == reason


def test_a_deadline():
    assert Deadline(None).left() == float("inf")
    assert 0 < Deadline(100).left() <= 100


@given(fitting=st.integers(0, 500), start=st.integers(1, 64), most=st.integers(64, 300))
def test_the_largest_batch_is_found(fitting, start, most):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= fitting

    assert largest(fits, start, most) == min(fitting, most)
    assert max(asked) <= most and len(asked) < 25


# ------------------------------------------------------------------- memory


def test_memory_on_the_cpu_grows_with_what_is_kept():
    def bytes_of(method, batch):
        return peak_memory(Setting("mlp-2", "mnist", batch), method, CPU, 0, seconds=60.0)

    ordinary = bytes_of("non-private", 64)
    if ordinary is None:
        pytest.skip("this system does not report it")
    # The loop holds every example's gradient: 64 times the model.
    model = sum(p.numel() * 4 for p in make_workload(SMALL, CPU, 0).model.parameters())
    assert bytes_of("loop", 64) > ordinary + 30 * model


def test_a_method_that_fails_there_gives_its_reason():
    with pytest.raises(NoMemoryFigure, match="refused: data="):
        peak_memory(Setting("mlp-2", "nothing", 4), "non-private", CPU, 0, seconds=60.0)


# --------------------------------------------------------------------- cell


def test_a_cell_holds_time_and_memory():
    cell = measure(SMALL, "bookkeeping", CPU, 0, BRIEF, most_seconds=120.0)
    assert "failed" not in cell
    assert cell["seconds"] > 0 and cell["ratio"] > 0 and cell["rounds"] == 1


def test_a_cell_that_fails_holds_the_reason():
    cell = measure(Setting("mlp-2", "nothing", 4), "loop", CPU, 0, BRIEF, most_seconds=120.0)
    assert cell["failed"].startswith("refused: data='nothing'") and "seconds" not in cell


def test_a_cell_that_is_too_slow_holds_the_reason():
    cell = measure(SMALL, "loop", CPU, 0, BRIEF, most_seconds=0.001)
    assert "took longer than" in cell["failed"]
