"""Entries on the disk, in parts that fit into memory one by one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

#: Parts at most: each has files of its own.
MOST_PARTS = 4096


class Spill:
    """Entries sorted into parts, which are written as they come and read one by one.

    Args:
        folder: a new one, for the files.
        part_of: gives the number of the part of each id, int64 ``[n]``.
    """

    def __init__(self, folder: Path, part_of: Callable[[Tensor], Tensor]) -> None:
        self._folder, self._part_of = folder, part_of
        self._columns: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        folder.mkdir()

    def put(self, entries: dict[str, Tensor]) -> None:
        """Takes entries by name; ``ids`` among them.

        Raises:
            OSError: writing failed.
        """
        parts = self._part_of(entries["ids"])
        order = parts.argsort(stable=True)
        numbers, counts = parts.unique(return_counts=True)
        for name, tensor in entries.items():
            self._columns[name] = (tensor.dtype, tuple(tensor.shape[1:]))
            values = tensor[order].contiguous()
            for part, piece in zip(numbers.tolist(), values.split(counts.tolist()), strict=True):
                with open(self._folder / f"{part}-{name}", "ab") as file:
                    file.write(memoryview(piece.reshape(-1).view(torch.uint8).numpy()))

    def take(self, part: int) -> dict[str, Tensor] | None:
        """All entries of a part, in the order in which they came; None where there are none. Their
        files go."""
        entries = {}
        for name, (dtype, shape) in self._columns.items():
            path = self._folder / f"{part}-{name}"
            if not path.exists():
                return None
            data = torch.from_numpy(numpy.fromfile(path, dtype=numpy.uint8))
            entries[name] = data.view(dtype).view(-1, *shape)
            path.unlink()
        return entries or None

    def close(self) -> None:
        """Removes what is left."""
        shutil.rmtree(self._folder, ignore_errors=True)
