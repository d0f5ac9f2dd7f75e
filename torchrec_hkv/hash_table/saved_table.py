"""A table by itself to a folder and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from torchrec_hkv.hash_table import files
from torchrec_hkv.hash_table.admission import Admission
from torchrec_hkv.hash_table.eviction import EvictionPolicy
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.table_spec import TableSpec
from torchrec_hkv.write_behind import (
    STAGING_BYTES,
    THREADS,
    SaveHandle,
    check_staging,
    wait_for_saves,
)


class SavedTable:
    """Files of a table. Part of ``HashTable``, which has the rest."""

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
        """Saves all that the table holds: ids, rows, scores, last steps and states, and its clock.

        ``docs/reference/file_format.md`` has the format. A save that is killed leaves the last one
        whole.
        What is saved is of one moment: calls of other threads that change the table wait until the
        files are written. Counts of ids that are not admitted are saved, too.

        Args:
            path: a folder; an earlier save in it is replaced.
            batch_bytes: memory the save may take, on the host and as much on the device.
            blocking: whether the call ends when all is on the disk. Otherwise it ends when all has
                been copied, and threads write while the table changes: what is saved is of the
                moment of the call. Another save waits for that.
            staging_bytes: with ``blocking=False``, host memory that copies may take besides
                ``batch_bytes``. Where they don't fit, the call waits for the disk, and the log says
                so.
            device_staging_bytes: with ``blocking=False``, memory of the table's GPU that copies may
                take before they go to host memory. None: what is free, but for a tenth of the GPU's
                memory.

        Returns:
            With ``blocking=False`` a handle (``wait()``, ``done()``, ``progress``); else None.

        Raises:
            ValueError: ``path`` is something else than a saved table, or a number of bytes is out
                of range.
            OSError: writing failed; the last save is whole.
        """
        check_staging(staging_bytes, device_staging_bytes)
        wait_for_saves()
        if blocking:
            with self._group.unchanged():
                files.save(self._group, 0, path, epoch=self.epoch, batch_bytes=batch_bytes)
            return None
        handle = SaveHandle(Path(path), staging_bytes, device_staging_bytes)
        try:
            with self._group.unchanged():
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

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        allow_loss: bool = False,
        batch_bytes: int = files.BATCH_BYTES,
    ) -> int:
        """Replaces all that the table holds by what was saved.

        Where the tables have the same capacity, all is as it was, to the slot of each id. In a
        table of another capacity ids are placed anew. Calls of other threads wait meanwhile, once
        the files have been verified. Counts of ids that are not admitted come
        where the table counts as the saved one did: in cells, or in a sketch of the same size.

        Args:
            path: as it was saved to.
            allow_loss: load also where there is less room: an id stays out where those in both of
                its buckets rank higher.
            batch_bytes: memory the load may take, on the host and as much on the device.

        Returns:
            How many ids found no place.

        Raises:
            ValueError: the files are damaged or of a table of another dim, dtype, policy, state
                width, name, seed or initialisation, or there is too little room; nothing has
                changed then. Where a table of another capacity turns out too small although less
                than 95 % of it are needed, it is left empty.
        """
        wait_for_saves()
        loaded = files.load(self._group, 0, path, allow_loss=allow_loss, batch_bytes=batch_bytes)
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
        """A table as it was saved.

        Args:
            path: as it was saved to.
            capacity: by default that of the saved table.
            initial_capacity: as for a new table; by default that of the saved table, where
                ``capacity`` is, too. The table grows at once as far as the files need it.
            eviction: by default that of the saved table, ``AgedLFU`` with the default c. A table
                under LRU, LFU or AgedLFU can be read as one under another of these; an id whose
                count is not known counts once.
            device: as for a new table.
            hbm_bytes: as for a new table.
            admission: as for a new table, since a file does not say; so the next five.
            expire_after: as for a new table.
            strict: as for a new table.
            remember_evicted: as for a new table.
            restore_counts: as for a new table.
            deterministic: as for a new table.
            allow_loss: as for :meth:`load`.

        Raises:
            ValueError: as for :meth:`load`.
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
