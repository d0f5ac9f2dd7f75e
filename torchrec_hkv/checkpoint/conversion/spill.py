"""Sorts entries into parts on the disk. Each part fits into memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

#: Maximal number of parts. Each part has files of its own.
MAX_PARTS = 4096


class Spill:
    """Entries sorted into parts. Entries are written as they come; parts are read one by one.

    Args:
        folder: a folder for the files, which must not exist.
        part_of: a function of ids that returns the number of each id's part, int64 ``[n]``.
    """

    def __init__(self, folder: Path, part_of: Callable[[Tensor], Tensor]) -> None:
        self._folder, self._part_of = folder, part_of
        self._columns: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        folder.mkdir()

    def put(self, entries: dict[str, Tensor]) -> None:
        """Adds entries.

        Args:
            entries: tensors by name, with ``ids`` among them.

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
        """Returns all entries of a part in the order in which they came, and removes their files.
        None if the part is empty."""
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
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
