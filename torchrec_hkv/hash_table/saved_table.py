"""Saves a hash table to a folder and loads it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch

from torchrec_hkv.hash_table import files
from torchrec_hkv.hash_table.admission import Admission
from torchrec_hkv.hash_table.eviction import EvictionPolicy
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.table_spec import TableSpec
from torchrec_hkv.progress import TaskProgress, reported
from torchrec_hkv.write_behind import (
    STAGING_BYTES,
    THREADS,
    SaveHandle,
    check_staging,
    wait_for_saves,
)


class SavedTable:
    """Saving and loading of a table; a base of ``HashTable``."""

    _group: TableGroup
    _make: Callable[[TableSpec, int, torch.device | str], None]
    epoch: int

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        batch_bytes: int = files.BATCH_BYTES,
        blocking: bool = True,
        staging_bytes: int = STAGING_BYTES,
        device_staging_bytes: int | None = None,
    ) -> SaveHandle | None:
        """Saves the table: ids, rows, scores, last steps, states, admission counters and clock.

        The format is in ``docs/reference/file_format.md``. If the save is killed, the previous one
        stays complete. The saved contents are consistent: calls of other threads that change the
        table wait until the files are written.

        Args:
            path: a folder; an earlier save in it is replaced.
            batch_bytes: memory limit in bytes, on the host and on the device each.
            blocking: True: the call returns when all data is on the disk. False: it returns when
                all data has been copied, and threads write while the table changes. The file holds
                the contents at the time of the call. Another save waits for this one.
            staging_bytes: with ``blocking=False``, host memory in bytes that copies may take
                besides ``batch_bytes``. If they don't fit, the call waits for the disk and logs it.
            device_staging_bytes: with ``blocking=False``, memory in bytes of the table's GPU that
                copies may take before they go to host memory. None: free memory, including the
                memory that PyTorch caches, less a tenth of the GPU's memory.

        Returns:
            With ``blocking=False`` a handle (``wait()``, ``done()``, ``progress``); else None.

        Raises:
            ValueError: ``path`` is not a folder of a saved table, or a number of bytes is out of
                range.
            OSError: writing failed; the previous save is complete.
        """
        check_staging(staging_bytes, device_staging_bytes)
        wait_for_saves()
        if blocking:
            with self._group.unchanged(), self._saving(path):
                files.save(self._group, 0, path, epoch=self.epoch, batch_bytes=batch_bytes)
            return None
        handle = SaveHandle(Path(path), staging_bytes, device_staging_bytes)
        try:
            with self._group.unchanged(), self._saving(path):
                files.save(
                    self._group,
                    0,
                    path,
                    epoch=self.epoch,
                    batch_bytes=batch_bytes,
                    threads=THREADS,
                    handle=handle,
                )
        except BaseException as error:
            handle.abort(error)
            raise
        handle.close()
        return handle

    def _saving(self, path: str | os.PathLike[str]) -> AbstractContextManager[TaskProgress]:
        return reported(f"Saving {Path(path).name}", files.saved_bytes(self._group, 0))

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        allow_loss: bool = False,
        batch_bytes: int = files.BATCH_BYTES,
    ) -> int:
        """Replaces the contents of the table by saved ones.

        If the capacities are equal, each id gets the slot it had. Otherwise ids are inserted again.
        Once the files are verified, calls of other threads wait until the end. Admission counters
        are loaded if both tables count in cells, or in sketches of the same size.

        Args:
            path: the folder of a saved table.
            allow_loss: True: load even if the table has too little room; an id is left out if all
                ids in its two buckets rank higher.
            batch_bytes: memory limit of the load in bytes, on the host and on the device each.

        Returns:
            Number of ids that found no slot.

        Raises:
            ValueError: the files are damaged, or of a table of another dim, dtype, policy, state
                width, name, seed or initializer, or there is too little room. Nothing has changed
                then. Exception: a table of another capacity is empty afterwards if ids find no slot
                although less than 95 % of its slots are needed.
        """
        wait_for_saves()
        with reported(f"Loading {Path(path).name}"):
            loaded = files.load(
                self._group, 0, path, allow_loss=allow_loss, batch_bytes=batch_bytes
            )
        self.epoch = loaded.epoch
        return loaded.lost

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        capacity: int | None = None,
        initial_capacity: int | None = None,
        eviction: EvictionPolicy | None = None,
        device: torch.device | str = "cpu",
        hbm_bytes: int | None = None,
        admission: Admission | None = None,
        expire_after: int | None = None,
        strict: bool = False,
        remember_evicted: int | None = None,
        restore_counts: bool = False,
        deterministic: bool = False,
        allow_loss: bool = False,
    ) -> Self:
        """Makes a table from a saved table.

        Args:
            path: the folder of a saved table.
            capacity: capacity of the new table; by default that of the saved table.
            initial_capacity: see :class:`HashTable`; that of the saved table by default, if
                ``capacity`` is not given. The table grows as far as the files require.
            eviction: eviction policy; that of the saved table by default, with the default c for
                ``AgedLFU``. Tables under LRU, LFU and AgedLFU can be loaded under another of these
                policies; an id whose count is unknown gets the count 1.
            device: see :class:`HashTable`.
            hbm_bytes: see :class:`HashTable`.
            admission: see :class:`HashTable`. Files do not store this and the next five arguments.
            expire_after: see :class:`HashTable`.
            strict: see :class:`HashTable`.
            remember_evicted: see :class:`HashTable`.
            restore_counts: see :class:`HashTable`.
            deterministic: see :class:`HashTable`.
            allow_loss: see :meth:`load`.

        Raises:
            ValueError: an argument has an invalid value, or as in :meth:`load`.
        """
        spec, state_dim = files.saved_spec(path)
        changes: dict[str, Any] = {
            "hbm_bytes": hbm_bytes,
            "admission": admission,
            "expire_after": expire_after,
            "strict": strict,
            "remember_evicted": remember_evicted,
            "restore_counts": restore_counts,
            "deterministic": deterministic,
        }
        if eviction is not None:
            changes["eviction"] = eviction
        if capacity is not None:
            changes |= {"capacity": capacity, "initial_capacity": initial_capacity}
        elif initial_capacity is not None:
            changes["initial_capacity"] = initial_capacity
        table = cls.__new__(cls)
        spec = dataclasses.replace(spec, **changes)
        try:
            table._make(spec, state_dim, device)
        except ValueError as error:
            raise ValueError(f"The table at {os.fspath(path)} can't be made: {error}") from None
        table.load(path, allow_loss=allow_loss)
        return table
