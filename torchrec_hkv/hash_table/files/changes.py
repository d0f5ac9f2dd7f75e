"""Finds what changed in a table since it was last saved.

Training does not mark changes. Every slot stores the step of its last lookup, and a row changes
only between a lookup and the backward of that lookup. A row may therefore have changed if its
slot's step is not before the first step that was open at the last save. Ids that left or moved are
found by comparing the id of each slot with a copy from the last save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv import _C, checksums
from torchrec_hkv.hash_table.files.block_files import host_memory
from torchrec_hkv.hash_table.files.file_names import removed_ids_name
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.manifest_parts import DeltaContent, reduced_of
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.slot_snapshot import COMPARE_BYTES, SlotSnapshot
from torchrec_hkv.write_behind import SaveHandle
from torchrec_hkv.write_behind_file import WriteBehindFile

#: Bytes of a pair of slot and id.
_PAIR_BYTES = 16
_BASELINE_BATCH_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class TableChanges:
    """The changes found by :meth:`ChangeTracker.find_changes`.

    Attributes:
        slots: int64, ascending, in host memory: slots whose entries changed or are new. None if the
            whole table must be saved.
        delta_content: returns the description for the manifest, after the file of ids that left is
            written. None if the whole table must be saved.
    """

    slots: Tensor | None = None
    delta_content: Callable[[], DeltaContent | None] = lambda: None


class ChangeTracker:
    """Tracks what changed in a table since the last look at it.

    It takes 9 bytes of host memory for each slot of the table.

    Args:
        group: the group of the table.
        table: index of the table in the group.
    """

    def __init__(self, group: TableGroup, table: int) -> None:
        self._group, self._table = group, table
        self._snapshot = SlotSnapshot(group, table)
        # Slots whose entries changed without a lookup.
        self._noted: list[Tensor] = []
        # First open step at the last look. None: the next look treats everything as changed.
        self._first_open: int | None = None
        self._rewrites = 0
        group.add_listener(self)

    def forget(self) -> None:
        """Makes the next :meth:`find_changes` find the whole table changed."""
        self._first_open = None

    def note_changed(self, table: int, slots: Tensor) -> None:
        """Called by the group when entries change without being looked up."""
        if table == self._table and self._first_open is not None:
            self._noted.append(slots.cpu())

    def start_from(self, folder: Path, states: bool, row_dtype: torch.dtype | None) -> bool:
        """Makes the next :meth:`find_changes` find only the changes from now on.

        Call it within ``group.unchanged()``, after the table was loaded from a folder.

        Args:
            folder: folder of the saved table.
            states: whether later saves contain optimizer states.
            row_dtype: dtype to which later saves round rows. None: no rounding.

        Returns:
            False if later saves can't add to the folder, because the table has another geometry, or
            entries have other parts. Nothing is done then.
        """
        group, manifest = self._group, Manifest.read(folder)
        *_, buckets, bucket_slots = _C.table_layout(group.handle, self._table)
        if (
            (buckets, bucket_slots) != (manifest.buckets, manifest.bucket_slots)
            or manifest.reduced != reduced_of(group.tables[self._table].dtype, states, row_dtype)
            or group.clock != manifest.clock
        ):
            return False
        self.forget()
        self.find_changes(folder, "", _BASELINE_BATCH_BYTES, [])
        return True

    def find_changes(
        self,
        folder: Path,
        save_name: str,
        batch_bytes: int,
        written: list[Path],
        handle: SaveHandle | None = None,
    ) -> TableChanges:
        """Finds what changed since the last look, and writes which ids left their slots.

        Call it within ``group.unchanged()``. If the save fails, call :meth:`forget`.

        Args:
            folder: folder for the file of ids that left.
            save_name: 8 hexadecimal digits, unique for the save.
            batch_bytes: memory limit in bytes, on the host and on the device each. On the host, 8
                bytes more are used per changed entry.
            written: list to which the file is appended when it is created.
            handle: handle of a non-blocking save, whose threads write the file.
        """
        group = self._group
        first_open, rewrites = group.first_open_step, group.rewrites
        since = self._first_open if rewrites == self._rewrites else None
        self.forget()  # in case the look fails
        noted, self._noted = torch.cat(self._noted) if self._noted else None, []
        batch = max(1, batch_bytes // COMPARE_BYTES)
        if since is None:
            self._snapshot.take(batch)
            found = TableChanges()
        else:
            path = folder / removed_ids_name(save_name)
            written.append(path)
            found = self._compare(since, path, batch, noted, handle)
        self._first_open, self._rewrites = first_open, rewrites
        return found

    def _compare(
        self,
        since: int,
        path: Path,
        batch: int,
        noted: Tensor | None,
        handle: SaveHandle | None,
    ) -> TableChanges:
        changed = []
        num_removed = 0
        with WriteBehindFile(path, handle) as file:
            for found in self._snapshot.compare(since, batch, noted):
                changed.append(found.slots.cpu())
                pairs = torch.stack([found.vacated_slots, found.previous_ids], dim=1).cpu()
                file.write(host_memory(pairs))
                num_removed += len(pairs)
        entries = self._snapshot.entries
        return TableChanges(
            torch.cat(changed), lambda: DeltaContent(entries, path.name, num_removed, file.crc32)
        )


def read_removed_ids(
    folder: Path, changes: DeltaContent, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Reads the pairs of a slot that held another id before, and that id: int64 tensors with at
    most ``batch`` pairs at a time."""
    with open(folder / changes.left_file, "rb") as file:
        while data := file.read(batch * _PAIR_BYTES):
            pairs = torch.frombuffer(bytearray(data), dtype=torch.int64).view(-1, 2)
            yield pairs[:, 0], pairs[:, 1]


def verify_removed_ids(folder: Path, changes: DeltaContent, slots: int, batch_bytes: int) -> None:
    """Verifies a file of ids that left.

    Args:
        folder: the folder of the file.
        changes: the manifest's description of the file.
        slots: number of slots of the table.
        batch_bytes: memory limit in bytes.

    Raises:
        ValueError: the file is missing, damaged or of another size, or has a slot out of range.
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
                crc32 = checksums.crc32(data, crc32)
                numbers = torch.frombuffer(bytearray(data), dtype=torch.int64)[::2]
                ascending &= int(numbers[0]) > last and bool((numbers[1:] > numbers[:-1]).all())
                last = int(numbers[-1])
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    if crc32 != changes.left_crc32:
        raise ValueError(
            f"{path} is damaged: its checksum is {crc32}, but the manifest has "
            f"{changes.left_crc32}."
        )
    if not ascending or last >= slots:
        raise ValueError(
            f"{path} is inconsistent: its slots do not ascend within 0 to {slots - 1}."
        )
