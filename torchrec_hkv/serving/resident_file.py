"""Reads a file into memory of this process."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.block_files import BLOCK, BlockFile, host_memory
from torchrec_hkv.serving import ops as _registered  # noqa: F401

_PIECE = 8 << 20
#: Number of reads in flight. Threads wait in system calls, so there may be more than cores.
_THREADS = 4


def read_resident(path: Path, size: int, direct: bool = True) -> Tensor:
    """Reads the first ``size`` bytes of a file, into huge pages if the system grants them.

    Args:
        path: the file.
        size: number of bytes.
        direct: whether to bypass the page cache if the file system supports it. Use it for files
            that are not in the cache and should not get another copy there.

    Returns:
        uint8 ``[size]``, aligned to cache lines.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is shorter.
    """
    data: Tensor = torch.ops.torchrec_hkv.serving_memory(-(-size // BLOCK) * BLOCK)
    view = host_memory(data)
    with contextlib.closing(BlockFile(path, os.O_RDONLY, direct)) as file:

        def read(begin: int) -> None:
            needed = min(_PIECE, size - begin)
            got = file.read_blocks(view[begin : begin + _PIECE], begin, needed)
            if got < needed:
                raise ValueError(f"{path} ends at byte {begin + got}, but must have {size} bytes.")

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="read") as pool:
            for _ in pool.map(read, range(0, size, _PIECE)):
                pass
    return data[:size]
