"""Whether there is enough memory for book-keeping.

Book-keeping keeps more than plain training does: the output gradients of all uses (their sizes follow from the graph)
and some per-example gradients (examples.py). Together with the sums, and with the state that an optimizer may allocate
after the first step (two numbers per parameter, as in Adam), this must fit into four fifths of the free memory of the
device after the forward pass.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from clipwise.gradients.examples import Parameters, keep_bytes

_SHARE = 0.8  # of free memory: the rest is lost to fragmentation
_OPTIMIZER = 2  # numbers of optimizer state per parameter
_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # limits set by a container


def has_space_for(output_bytes: Counter[torch.device], parameters: Parameters, batch: int) -> bool:
    """Whether book-keeping fits into the free memory of every device. Unknown memory counts as enough."""
    for device, size in wanted_bytes(output_bytes, parameters, batch).items():
        free = free_bytes(device)
        if free is not None and size > _SHARE * free:
            return False
    return True


def wanted_bytes(output_bytes: Counter[torch.device], parameters: Parameters, batch: int) -> Counter[torch.device]:
    """An upper estimate of what book-keeping allocates after the forward pass, per device."""
    wanted = Counter(output_bytes)
    weights: Counter[torch.device] = Counter()
    for p in parameters.values():
        weights[p.device] += p.numel() * p.element_size()
    for device, size in weights.items():
        wanted[device] += (1 + _OPTIMIZER) * size + min(keep_bytes({device}), batch * size)
    return wanted


def free_bytes(device: torch.device) -> int | None:
    """The memory that can still be allocated on a device, or None if unknown. Does not synchronize."""
    if device.type == "cuda":
        # Free memory of the driver, and unused memory held by torch's allocator.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type != "cpu":
        return None
    # The available memory of the system, or of the process group if it has a lower limit.
    known = [size for size in (_available(), _left_to_group()) if size is not None]
    return min(known) if known else None


def _available() -> int | None:
    """Parses a line such as `MemAvailable:  1234 kB`."""
    return next((1024 * int(s.split()[1]) for s in _lines(_SYSTEM) if s.startswith("MemAvailable:")), None)


def _left_to_group() -> int | None:
    """The group's limit minus its usage, without inactive file pages, which would be reclaimed."""
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
