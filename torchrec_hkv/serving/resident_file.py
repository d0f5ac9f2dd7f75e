"""Reads a file into memory of this process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.serving import ops as _registered  # noqa: F401

_PIECE = 32 << 20
#: Reads in flight. Threads spend them in the system, so that they may be more than cores.
_THREADS = 4


def read_resident(path: Path, size: int) -> Tensor:
    """The first ``size`` bytes of a file, in huge pages where the system grants them.

    Args:
        path: the file.
        size: number of bytes.

    Returns:
        uint8 ``[size]``, aligned to cache lines.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is shorter.
    """
    data: Tensor = torch.ops.torchrec_hkv.serving_memory(size)
    view = memoryview(data.numpy())
    file = os.open(path, os.O_RDONLY)

    def read(begin: int) -> None:
        end = min(begin + _PIECE, size)
        while begin < end:
            got = os.preadv(file, [view[begin:end]], begin)
            if got == 0:
                raise ValueError(f"{path} ends at byte {begin}, but must have {size} bytes.")
            begin += got

    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="read") as pool:
            for _ in pool.map(read, range(0, size, _PIECE)):
                pass
    finally:
        os.close(file)
    return data
