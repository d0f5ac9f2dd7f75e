"""Applies the deltas of a chain to a served model.

A version of a model is immutable. A delta creates the next version: its rows and erased ids form a
layer over the tables' files, and dense parameters are copied. The model then switches to that
version in one step. Running calls finish with the version that they started with.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.checkpoint.chain import Chain, digest_of
from torchrec_hkv.checkpoint.record import LINK
from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.checkpoints import Checkpoint
from torchrec_hkv.serving.model import Freshness, ServingModel, Version
from torchrec_hkv.serving.page_cache import warm
from torchrec_hkv.serving.served_program import ServedProgram
from torchrec_hkv.serving.table_builder import build_table
from torchrec_hkv.serving.table_file import TableFile, place_layer
from torchrec_hkv.serving.tables import Changes, ReadOnlyTable, ReadOnlyTables
from torchrec_hkv.tensor_train import TTGroup

_PIECE = 1 << 16


def follow(
    model: ServingModel,
    folder: str | os.PathLike[str],
    *,
    every: float | None = 1.0,
    scratch: str | os.PathLike[str] | None = None,
    process: bool = False,
) -> Follower:
    """Applies what a ``DeltaWriter`` writes while the model serves.

    The chain's newest checkpoint, if there is one, is applied before this returns. If the model was
    exported with ``deltas=``, only the deltas after the export are applied; otherwise the chain's
    base is read first.

    A missing or damaged checkpoint ends following. The model serves its last version, and
    :meth:`ServingModel.freshness` has the error.

    Args:
        model: a model that does not follow a chain yet.
        folder: folder of the chain.
        every: seconds between polls of a background thread. None: only :meth:`Follower.poll` polls.
        scratch: folder on a disk with room for the tables of the chain's bases. Their files are
            unlinked once they are written, and freed when they are no longer served. None: the
            system's folder for temporary files.
        process: whether another process reads and merges checkpoints. Calls of the model then don't
            wait for the interpreter meanwhile. The process takes some seconds to start and memory
            for another copy of the changed rows, has a low priority, and passes each version
            through a file in ``scratch``.

    Raises:
        ValueError: the model follows another chain, its tables can't follow, or ``every`` is not
            positive; or the chain's newest checkpoint can't be applied.
    """
    if every is not None and not every > 0:
        raise ValueError(f"every is {every!r}, but must be positive, or None.")
    if model._follower is not None and model._follower.is_following:
        raise ValueError(f"the model already follows {model._follower.folder}: stop that first.")
    if process:
        from torchrec_hkv.serving.following_process import ProcessFollower

        follower: Follower = ProcessFollower(model, Path(folder), scratch)
    else:
        follower = Follower(model, Path(folder), scratch)
    follower.poll()
    if (error := follower.error) is not None:
        raise ValueError(error)
    model._follower = follower
    if every is not None:
        follower._start(every)
    return follower


class Follower:
    """Applies a chain to a model; :func:`follow` returns it."""

    def __init__(
        self, model: ServingModel, folder: Path, scratch: str | os.PathLike[str] | None
    ) -> None:
        #: Folder of the chain.
        self.folder = folder
        #: The error that ended following, or None.
        self.error: str | None = None
        self._model = model
        self._scratch = scratch
        self._lock = threading.Lock()
        self._previous: Version | None = None
        self._newest: int | None = None
        self._apply_seconds: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_following(self) -> bool:
        """Whether later checkpoints will be applied."""
        return not self._ended.is_set()

    def poll(self) -> int:
        """Applies new checkpoints now.

        Returns:
            Number of checkpoints applied. None if following has ended, or ends now with an
            :attr:`error`.
        """
        with self._lock:
            if self._ended.is_set():
                return 0
            try:
                return self._apply_new()
            except (ValueError, OSError, RuntimeError) as error:
                self.error = str(error)
                self._end()
                return 0

    def rollback(self) -> None:
        """Serves the previous version again, and stops following.

        Raises:
            ValueError: there is no previous version.
        """
        with self._lock:
            if self._previous is None:
                raise ValueError(
                    "no earlier version is kept: no checkpoint was applied, or rollback was called "
                    "before."
                )
            self._model._version, self._previous = self._previous, None
            self._end()

    def stop(self) -> None:
        """Stops following. The model keeps serving its present version."""
        self._end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def freshness(self, version: Version, age: float | None) -> Freshness:
        """Freshness of a version of the model."""
        behind = None
        if self._newest is not None and version.number is not None:
            behind = max(0, self._newest - version.number)
        return Freshness(
            version.number, age, behind, self.is_following, self.error, self._apply_seconds
        )

    def _end(self) -> None:
        self._ended.set()

    def _start(self, every: float) -> None:
        def run() -> None:
            while not self._ended.wait(every):
                self.poll()

        self._thread = threading.Thread(target=run, name="torchrec_hkv follow", daemon=True)
        self._thread.start()

    def _apply_new(self) -> int:
        while True:
            newest = Chain(self.folder).newest()
            if newest is None:
                return 0
            self._newest = newest.number
            if newest.digest == self._model._version.checkpoint:
                return 0
            try:
                return self._apply_until(newest.number)
            except ValueError:
                # After a newer base, the writer may have removed a checkpoint during the read.
                if Chain(self.folder).newest() == newest:
                    raise

    def _apply_until(self, last: int) -> int:
        folders = [folder for folder, _ in reversed(Chain(self.folder, last).layers())]
        digests = [digest_of(folder) for folder in folders]
        first = 0
        if self._model._version.checkpoint in digests:
            first = 1 + digests.index(self._model._version.checkpoint)
        for folder, digest in zip(folders[first:], digests[first:], strict=True):
            began = time.monotonic()
            version = self._build(folder, digest)
            if self._ended.is_set():
                return 0
            self._switch(version, time.monotonic() - began)
        return len(folders) - first

    def _build(self, folder: Path, digest: str) -> Version:
        model = self._model
        following = NextVersion(model._version, folder, digest, model.device, model.resident)
        # A mapped file exists until it is unmapped, so a killed process leaves no files.
        with tempfile.TemporaryDirectory(prefix="torchrec_hkv-", dir=self._scratch) as scratch:
            return following.version(Path(scratch))

    def _switch(self, version: Version, seconds: float) -> None:
        self._previous, self._model._version = self._model._version, version
        self._apply_seconds = seconds


class NextVersion:
    """Builds the next version of a model from a checkpoint."""

    def __init__(
        self, before: Version, folder: Path, digest: str, device: torch.device, resident: bool
    ) -> None:
        self._before, self._folder, self._digest = before, folder, digest
        self._device, self._resident = device, resident
        self._checkpoint = Checkpoint(folder)
        self._is_delta = folder.name.startswith("delta")
        #: Files of the tables, if the checkpoint is a base.
        self.files: list[TableFile] = []

    def version(self, folder: Path) -> Version:
        """Builds the version.

        Args:
            folder: folder for the files of the tables of a base.

        Raises:
            ValueError: the checkpoint is damaged, or of another model.
            OSError: the disk has no room for the tables.
        """
        before, number = self._before, int(self._folder.name.rpartition("-")[2])
        if self._is_delta:
            tables = [self._changed(n, table) for n, table in enumerate(before.tables.tables)]
        else:
            tables = [
                self._whole(table, folder, f"{n}.table")
                for n, table in enumerate(before.tables.tables)
            ]
        cores = [(group, self._cores(group, its)) for group, its in before.cores]
        opened = ReadOnlyTables(tables, before.tables.counters, cores)
        return Version(
            opened,
            cores,
            self._program(before.program),
            self._digest,
            number,
            (self._folder / LINK).stat().st_mtime,
            before.base if self._is_delta else self._digest,
        )

    def _whole(self, table: ReadOnlyTable, folder: Path, name: str) -> ReadOnlyTable:
        """Builds a table from a base."""
        has_files = self._checkpoint.has_files(table.name)
        written = build_table(
            lambda: self._entries(table),
            table.dim,
            table.row_format,
            folder / name,
            order=self._checkpoint.order(table.name) if has_files else (),
        )
        self.files.append(written)
        index, rows = written.map(folder, self._resident)
        if self._device.type == "cpu" and not self._resident:
            warm(folder, [(written, index)])
        return dataclasses.replace(
            table,
            index=index.to(self._device),
            rows=rows.to(self._device),
            unit=written.unit,
            changed_index=None,
            changed_rows=None,
            changes=None,
        )

    def _entries(self, table: ReadOnlyTable) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and rows of a table in a base."""
        if self._checkpoint.has_files(table.name):
            for ids, rows in self._checkpoint.entries(table.name):
                self._check_dim(table, rows)
                yield ids, rows
            return
        weight = self._weight(table)
        for ids in torch.arange(weight.shape[0]).split(_PIECE):
            yield ids, weight[ids].float()

    def _changed(self, number: int, table: ReadOnlyTable) -> ReadOnlyTable:
        """Adds the changes of a delta to a table."""
        erased = torch.empty(0, dtype=torch.int64)
        if self._checkpoint.has_files(table.name):
            parts, erased = self._checkpoint.changes(table.name)
            ids, rows = parts[0].ids, parts[0].rows
            if len(parts) > 1:
                rows = self._held(number, ids)
                ascending, order = ids.sort()
                for part in parts:  # ids that the shard of the first columns lacks are left out
                    known = torch.isin(part.ids, ids)
                    places = order[torch.searchsorted(ascending, part.ids[known])]
                    columns = slice(part.begin, part.begin + part.rows.shape[1])
                    rows[places, columns] = part.rows[known]
            self._check_dim(table, rows)
        else:
            ids, rows = self._changed_rows(number, table)
        if ids.numel() == 0 and erased.numel() == 0:
            return table
        self._check_range(table, rows)
        data = row_formats.to_bytes(rows, table.row_format, table.unit)
        merged = _merged(table.changes, ids, data, erased)
        index, order = place_layer(merged.ids, merged.is_erased)
        changes = Changes(
            merged.ids[order], merged.data.index_select(0, order), merged.is_erased[order]
        )
        return dataclasses.replace(
            table,
            changed_index=index.to(self._device),
            changed_rows=changes.data.to(self._device),
            changes=changes,
        )

    def _held(self, number: int, ids: Tensor) -> Tensor:
        """Rows of ids in the previous version, in host memory."""
        uncounted = ReadOnlyTables([self._before.tables.tables[number]], _uncounted(self._device))
        return uncounted.rows(0, ids.to(self._device)).cpu()

    def _changed_rows(self, number: int, table: ReadOnlyTable) -> tuple[Tensor, Tensor]:
        """The rows that changed in a table that deltas hold whole."""
        weight = self._weight(table)
        changed_ids, changed_rows = [], []
        for ids in torch.arange(weight.shape[0]).split(_PIECE):
            rows = weight[ids].float()
            self._check_range(table, rows)
            data = row_formats.to_bytes(rows, table.row_format, table.unit)
            now = row_formats.from_bytes(data, table.row_format, table.dim, table.unit)
            differs = (now.view(torch.int32) != self._held(number, ids).view(torch.int32)).any(1)
            changed_ids.append(ids[differs])
            changed_rows.append(rows[differs])
        return torch.cat(changed_ids), torch.cat(changed_rows)

    def _weight(self, table: ReadOnlyTable) -> Tensor:
        name = f"{table.name}.weight"
        weight = self._checkpoint.tensors([name])[name]
        self._check_dim(table, weight)
        return weight

    def _check_dim(self, table: ReadOnlyTable, rows: Tensor) -> None:
        if rows.dim() != 2 or rows.shape[1] != table.dim:
            raise ValueError(
                f"{self._folder} has rows of shape {tuple(rows.shape[1:])} for table "
                f"{table.name!r}, but the model has {table.dim} columns: it is of another model."
            )

    def _check_range(self, table: ReadOnlyTable, rows: Tensor) -> None:
        if table.row_format not in ("int8", "int4") or rows.numel() == 0:
            return
        largest, most = float(rows.abs().max()), row_formats.most_for(table.unit)
        if not largest <= most:
            raise ValueError(
                f"{self._folder} has a value of {largest} for table {table.name!r}, whose "
                f"{table.row_format} rows take at most {most}: export the model again."
            )

    def _cores(self, group: TTGroup, before: Sequence[Tensor]) -> list[Tensor]:
        names = [
            f"{name}.tt_core_{k}"
            for name, shape in zip(group.names, group.shapes, strict=True)
            for k in range(shape.num_cores)
        ]
        tensors = self._checkpoint.tensors(names)
        cores = []
        for name, own in zip(names, before, strict=True):
            core = tensors[name]
            if core.dtype != own.dtype or core.numel() != own.numel():
                raise ValueError(
                    f"{self._folder} has {name!r} of dtype {core.dtype} and {core.numel()} "
                    f"elements, but the model has {own.dtype} and {own.numel()}: it is of another "
                    "model."
                )
            cores.append(core.view(own.shape).to(self._device))
        return cores

    def _program(self, before: ServedProgram) -> ServedProgram:
        """The program with the checkpoint's dense tensors."""
        own = before.state
        names = {key: key.removeprefix("model.") for key in own}
        tensors = self._checkpoint.tensors(list(names.values()))
        state = {key: tensors[name] for key, name in names.items()}
        for key, value in state.items():
            if value.shape != own[key].shape:
                raise ValueError(
                    f"{self._folder} has {names[key]!r} of shape {tuple(value.shape)}, but the "
                    f"model has {tuple(own[key].shape)}: it is of another model."
                )
        if all(torch.equal(value, own[key].cpu()) for key, value in state.items()):
            return before
        return before.with_state(state)


def _merged(before: Changes | None, ids: Tensor, data: Tensor, erased: Tensor) -> Changes:
    """Merges changes; later ones take precedence."""
    if before is None:
        before = Changes(ids[:0], data[:0], torch.empty(0, dtype=torch.bool))
    own = torch.cat([ids, erased])
    kept = (~torch.isin(before.ids, own)).nonzero().flatten()
    no_rows = data.new_zeros(erased.numel(), data.shape[1])
    is_erased = torch.zeros(own.numel(), dtype=torch.bool)
    is_erased[ids.numel() :] = True
    return Changes(
        torch.cat([before.ids[kept], own]),
        torch.cat([before.data.index_select(0, kept), data, no_rows]),
        torch.cat([before.is_erased[kept], is_erased]),
    )


def _uncounted(device: torch.device) -> Tensor:
    return torch.zeros(1, 2, dtype=torch.int64, device=device)
