"""The hardware and software of a measurement."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from clipwise import __version__
from clipwise.errors import ConfigurationError

_PACKAGES = ("torch", "numpy", "opacus")


def device_of(name: str) -> torch.device:
    """The device of a name, `cpu` or `cuda`; raises if it is not available."""
    if name not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={name!r} is not known: use 'cpu' or 'cuda'.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device='cuda' is not possible: torch finds no CUDA device. Use 'cpu'.")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


@contextmanager
def at_its_best(device: torch.device) -> Iterator[None]:
    """Set torch's switches for speed on CUDA (tf32, fastest convolution algorithms); restores them afterwards."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    torch.set_float32_matmul_precision("high")
    cudnn.allow_tf32 = cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.benchmark = before[1:]


def keep_memory() -> None:
    """Make this process keep the memory that it frees: waiting for new pages takes up to half of a step, at random.

    For measurements only; lasts until the process ends. Does nothing if the C library is not glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3  # of mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**30)


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, in plain types. Results with equal environments are comparable."""
    found: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {"clipwise": __version__} | {name: version for name in _PACKAGES if (version := _version(name))},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30),
            "cuda": torch.version.cuda,
            "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        }
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError):
        return None
