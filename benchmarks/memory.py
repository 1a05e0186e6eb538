"""Peak memory of training: model, optimizer, data and one step.

On CUDA it is the peak of torch's allocator in a step, and the memory that CUDA graphs keep for their temporary tensors.
On the CPU it is the peak growth of the resident memory of a fresh process, forked
from one that has imported everything and computed nothing. That process may use only a part of the free memory, so
that a method that needs more fails without harm to the machine.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from benchmarks.methods import settling_steps, steps_by, synchronize
from benchmarks.workload import Setting, make_workload
from experiments.harness.limits import reason_of

_SHARE = 0.6  # of the memory that is available
_IMPORT_SECONDS = 120.0  # the most for starting a process: on a busy machine, imports take long
_STATUS, _PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class NoMemoryFigure(Exception):  # noqa: N818 (says why a method has no result)
    """The method failed before its memory could be measured; the message is the reason."""


def peak_memory(setting: Setting, method: str, device: torch.device, seed: int, seconds: float) -> int | None:
    """Peak bytes after the first steps; None where the system does not report them.

    Raises:
        NoMemoryFigure: the method failed on the CPU, for the reason in the message.
    """
    if device.type == "cuda":
        return _on_cuda(setting, method, device, seed)
    return _in_a_process(setting, method, seed, seconds) if _STATUS.exists() else None


def _on_cuda(setting: Setting, method: str, device: torch.device, seed: int) -> int:
    """Makes all first steps, however long kernels take to compile: steps that probe a graph take more memory."""
    before = held(device)
    with steps_by(method, make_workload(setting, device, seed)) as step:
        for _ in range(settling_steps(method)):
            step()
        return peak_of(step, device) - before


def held(device: torch.device) -> int:
    """Bytes of live tensors, and what CUDA graphs keep beside them."""
    torch.cuda.empty_cache()
    ones = torch.ones(2, 2, device=device)
    torch.mm(ones, ones)  # cuBLAS allocates its workspace once
    del ones
    return torch.cuda.memory_allocated(device) + _kept_by_graphs()


def peak_of(step: Callable[[], None], device: torch.device) -> int:
    """The peak bytes of a step, with what CUDA graphs keep."""
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) + _kept_by_graphs()


def _kept_by_graphs() -> int:
    """Bytes of memory pools of graphs without a live tensor in them. Replays use them for temporary tensors."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def _in_a_process(setting: Setting, method: str, seed: int, seconds: float) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "opacus"])  # missing modules are skipped
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, setting, method, seed, seconds), daemon=True)
    process.start()
    sender.close()
    try:
        for most in (_IMPORT_SECONDS, seconds):  # it sends a message when it begins, then the result
            if not receiver.poll(most):
                raise NoMemoryFigure(f"took longer than {most:.0f} s")
            answer: int | str = receiver.recv()
    except EOFError:
        answer = "its process was killed, most likely for memory"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, str):
        raise NoMemoryFigure(answer)
    return answer


def _measure(sender: Connection, setting: Setting, method: str, seed: int, seconds: float) -> None:
    """In the new process: send a message when it begins, then the bytes or a reason."""
    sender.send(0)
    warnings.simplefilter("ignore")
    allowed = _kilobytes(Path("/proc/meminfo"), "MemAvailable") * _SHARE + _kilobytes(_STATUS, "VmData")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(allowed) * 1024, hard))
    _touch()
    before = _kilobytes(_STATUS, "VmRSS")
    try:
        with steps_by(method, make_workload(setting, torch.device("cpu"), seed)) as step:
            for counts in _plan(settling_steps(method), seconds):
                if counts:
                    _return_freed_memory()
                    _PEAK_RESET.write_text("5")  # VmHWM becomes VmRSS
                step()
            sender.send((_kilobytes(_STATUS, "VmHWM") - before) * 1024)
    except Exception as error:
        sender.send(reason_of(error))


def _return_freed_memory() -> None:
    """The C library keeps memory that the first steps freed, and it would be counted. Only glibc can return it."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _touch() -> None:
    """Make a tiny step, so that what torch loads at first use is not counted."""
    model = nn.Linear(8, 8)
    torch.autograd.backward(model(torch.ones(8, 8)).sum())
    torch.optim.Adam(model.parameters()).step()


def _plan(settling: int, seconds: float) -> Iterator[bool]:
    """False for every warm-up step, then True for the one that counts.

    If a step takes too long there is no second one, and the peak is that of the first.
    """
    start = time.perf_counter()
    for _ in range(settling):
        yield False
        if time.perf_counter() - start > seconds / 4:
            return
    yield True


def _kilobytes(file: Path, field: str) -> int:
    """A line such as `VmRSS:  1234 kB` of a file under /proc."""
    line = next(line for line in file.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])
