"""How much memory is left on a device, for those who must choose between time and memory."""

from __future__ import annotations

from pathlib import Path

import torch

_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # the limits that a container sets


def free_bytes(device: torch.device) -> int | None:
    """What a program could still allocate there, or None where nobody tells. It waits for no device."""
    if device.type == "cuda":
        return _on_cuda(device)
    return _on_the_host() if device.type == "cpu" else None


def _on_cuda(device: torch.device) -> int:
    """What the driver would give, and what torch's allocator holds and does not use."""
    reserved = torch.cuda.memory_reserved(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free + reserved - torch.cuda.memory_allocated(device)


def _on_the_host() -> int | None:
    """What the system says is available, or less within a group of processes that has a limit of its own."""
    system, group = _available(_SYSTEM), _left_to_group(_GROUP)
    known = [size for size in (system, group) if size is not None]
    return min(known) if known else None


def _available(meminfo: Path) -> int | None:
    """A line such as `MemAvailable:  1234 kB`."""
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_to_group(group: Path) -> int | None:
    """The group's limit less what it uses; pages of files that nobody waits for would be given up."""
    limit, used = (next(iter(_lines(group / name)), "") for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return None  # no such file, or no limit
    given_up = (
        int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("inactive_file ")
    )
    return max(0, int(limit) - int(used) + sum(given_up))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
