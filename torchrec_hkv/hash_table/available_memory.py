"""The available memory, so that a table that does not fit is refused before it is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# For control groups version 2 and version 1: the files with the limit and the usage, and the
# statistics that count cached files. Cached files can be evicted, so they do not count as used.
_CONTROL_GROUPS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def host_memory(root: str | os.PathLike[str] = "/") -> tuple[int, int]:
    """Available and total host memory in bytes, within the limits of a control group (container).

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    meminfo = _numbers(Path(root, "proc/meminfo"))
    if "MemAvailable:" in meminfo:
        available, total = 1024 * meminfo["MemAvailable:"], 1024 * meminfo["MemTotal:"]
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        available = page * os.sysconf("SC_AVPHYS_PAGES")
        total = page * os.sysconf("SC_PHYS_PAGES")
    folder = Path(root, "sys/fs/cgroup")
    for limit_file, used_file, cached in _CONTROL_GROUPS:
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is None or used is None:
            continue
        statistics = _numbers((folder / limit_file).parent / "memory.stat")
        used -= sum(statistics.get(name, 0) for name in cached)
        available, total = min(available, max(0, limit - used)), min(total, limit)
    return available, total


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Available and total memory of a GPU in bytes. Unused memory that PyTorch's allocator holds is
    available."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused, total


def _number(path: Path) -> int | None:
    """The number in a file; None if the file is missing or holds something else, such as "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file with a name and a number on each line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {line[0]: int(line[1]) for line in fields if len(line) >= 2 and line[1].isdigit()}
