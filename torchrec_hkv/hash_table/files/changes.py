"""What changed in a table since it was last saved, found when it is asked for.

Training marks nothing. Every slot keeps the step of its last lookup, and a row changes only between
a lookup and that lookup's backward: rows that may have changed are those of slots with a step from
the first one that was open at the last save. Ids that left or moved are found by comparing the id
of each slot with a copy from the last save.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.block_files import host_memory
from torchrec_hkv.hash_table.files.manifest import Changes, left_name
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.slot_snapshot import COMPARE_BYTES, SlotSnapshot

#: Bytes of a pair of slot and id.
_PAIR_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Look:
    """What a look at a table found.

    Attributes:
        slots: int64, ascending, in host memory: those whose entries changed or are new. None where
            the whole table is to be saved.
        changes: what the manifest says of it; None where the whole table is to be saved.
    """

    slots: Tensor | None
    changes: Changes | None


class ChangeTracker:
    """Knows what a table held when it was last looked at.

    It takes 9 bytes of host memory for each slot of the table.

    Args:
        group: the table's.
        table: its index there.
    """

    def __init__(self, group: TableGroup, table: int) -> None:
        self._group, self._table = group, table
        self._snapshot = SlotSnapshot(group, table)
        self._noted: list[Tensor] = []
        # Of the last look; None: the next one finds that everything changed.
        self._first_open: int | None = None
        self._rewrites = 0
        group.tell_changes(self)

    def forget(self) -> None:
        """Makes the next look find that the whole table changed."""
        self._first_open = None

    def note_changed(self, table: int, slots: Tensor) -> None:
        """Called by the group: entries changed without being looked up."""
        if table == self._table and self._first_open is not None:
            self._noted.append(slots.cpu())

    def look(self, folder: Path, save_name: str, batch_bytes: int, written: list[Path]) -> Look:
        """Finds what changed since the last look, and writes which ids left their slots.

        Called within ``group.unchanged()``. If the save fails, call :meth:`forget`.

        Args:
            folder: gets the file of ids that left.
            save_name: 8 hexadecimal digits, a name of the save's own.
            batch_bytes: memory it may take, on the host and on the device, besides 8 bytes of the
                host's for each entry that changed.
            written: gets the file, if one is begun.
        """
        group = self._group
        first_open, rewrites = group.first_open_step, group.rewrites
        since = self._first_open if rewrites == self._rewrites else None
        self.forget()  # until the look has ended
        noted, self._noted = torch.cat(self._noted) if self._noted else None, []
        batch = max(1, batch_bytes // COMPARE_BYTES)
        if since is None:
            self._snapshot.take(batch)
            found = Look(None, None)
        else:
            path = folder / left_name(save_name)
            written.append(path)
            found = self._compare(since, path, batch, noted)
        self._first_open, self._rewrites = first_open, rewrites
        return found

    def _compare(self, since: int, path: Path, batch: int, noted: Tensor | None) -> Look:
        changed = []
        entries = left = crc32 = 0
        with open(path, "xb") as file:
            for found in self._snapshot.compare(since, batch, noted):
                changed.append(found.slots.cpu())
                entries += found.entries
                pairs = torch.stack([found.gone_slots, found.gone_ids], dim=1).cpu()
                data = host_memory(pairs)
                crc32 = zlib.crc32(data, crc32)
                file.write(data)
                left += len(pairs)
            file.flush()
            os.fsync(file.fileno())
        return Look(torch.cat(changed), Changes(entries, path.name, left, crc32))


def read_left(folder: Path, changes: Changes, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots that held other ids before, and these ids, int64, at most ``batch`` at a time."""
    with open(folder / changes.left_file, "rb") as file:
        while data := file.read(batch * _PAIR_BYTES):
            pairs = torch.frombuffer(bytearray(data), dtype=torch.int64).view(-1, 2)
            yield pairs[:, 0], pairs[:, 1]


def verify_left(folder: Path, changes: Changes, slots: int, batch_bytes: int) -> None:
    """Reads a file of ids that left.

    Args:
        folder: that holds it.
        changes: what the manifest says of it.
        slots: of the table.
        batch_bytes: memory it may take.

    Raises:
        ValueError: it is missing, of another size, damaged, or names an impossible slot.
    """
    path = folder / changes.left_file
    crc32, last, ascending = 0, -1, True
    try:
        size, named = path.stat().st_size, changes.left * _PAIR_BYTES
        if size != named:
            what = "cut short" if size < named else "too long"
            raise ValueError(f"{path} is {what}: it has {size} bytes instead of {named}.")
        with open(path, "rb") as file:
            while data := file.read(max(1, batch_bytes // (4 * _PAIR_BYTES)) * _PAIR_BYTES):
                crc32 = zlib.crc32(data, crc32)
                numbers = torch.frombuffer(bytearray(data), dtype=torch.int64)[::2]
                ascending &= int(numbers[0]) > last and bool((numbers[1:] > numbers[:-1]).all())
                last = int(numbers[-1])
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    if crc32 != changes.left_crc32:
        raise ValueError(
            f"{path} is damaged: its checksum is {crc32}, but the manifest names "
            f"{changes.left_crc32}."
        )
    if not ascending or last >= slots:
        raise ValueError(
            f"{path} contradicts itself: its slots do not ascend from 0 to {slots - 1}."
        )
