"""Whether there is memory for book-keeping.

It keeps more than plain training does: the output gradients of all uses, whose sizes the graph tells, and some
per-example gradients (examples.py). With the sums, and with what an optimizer may set up after the first step (two
numbers a parameter, as Adam does), that must fit into four fifths of what is free on the device after the forward pass.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from clipwise.gradients.examples import Parameters, keep_bytes

_SHARE = 0.8  # of free memory: what lies between its pieces is of no use
_OPTIMIZER = 2  # numbers that it keeps for each parameter
_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # the limits that a container sets


def has_space_for(output_bytes: Counter[torch.device], parameters: Parameters, batch: int) -> bool:
    """Whether book-keeping fits into the free memory of every device. Unknown memory counts as enough."""
    for device, size in wanted_bytes(output_bytes, parameters, batch).items():
        free = free_bytes(device)
        if free is not None and size > _SHARE * free:
            return False
    return True


def wanted_bytes(
    output_bytes: Counter[torch.device], parameters: Parameters, batch: int
) -> Counter[torch.device]:
    """What book-keeping allocates from the end of the forward pass on, by device; an upper estimate."""
    wanted = Counter(output_bytes)
    weights: Counter[torch.device] = Counter()
    for p in parameters.values():
        weights[p.device] += p.numel() * p.element_size()
    for device, size in weights.items():
        wanted[device] += (1 + _OPTIMIZER) * size + min(keep_bytes({device}), batch * size)
    return wanted


def free_bytes(device: torch.device) -> int | None:
    """What a program could still allocate there, or None where it is not known. It waits for no device."""
    if device.type == "cuda":
        # What the driver would give, and what torch's allocator holds and does not use.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type != "cpu":
        return None
    # What the system has available, or less within a group of processes that has a limit of its own.
    known = [size for size in (_available(), _left_to_group()) if size is not None]
    return min(known) if known else None


def _available() -> int | None:
    """A line such as `MemAvailable:  1234 kB`."""
    return next((1024 * int(s.split()[1]) for s in _lines(_SYSTEM) if s.startswith("MemAvailable:")), None)


def _left_to_group() -> int | None:
    """The group's limit less what it uses; pages of files that are not in use would be given up."""
    limit, used = (next(iter(_lines(_GROUP / name)), "") for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return None  # no such file, or no limit
    statistics = _lines(_GROUP / "memory.stat")
    given_up = (int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
    return max(0, int(limit) - int(used) + sum(given_up))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
