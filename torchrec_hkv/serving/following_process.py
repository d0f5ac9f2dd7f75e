"""Follows a chain in another process.

That process (``following_worker.py``) applies each checkpoint and writes the differences from the
previous version to a file. This process only maps the file and switches to the version. It spends
little time in Python, because threads that call the model wait for the interpreter's lock.

Messages are lines of JSON: ``"poll"`` in one direction; versions, then the end of the poll or an
error, in the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.serving import ops  # noqa: F401, registers what the program calls
from torchrec_hkv.serving.following import Follower
from torchrec_hkv.serving.manifest import ServingManifest
from torchrec_hkv.serving.model import ModelVersion, ServingModel
from torchrec_hkv.serving.open_files import open_tables
from torchrec_hkv.serving.page_cache import warm
from torchrec_hkv.serving.resident_file import read_resident
from torchrec_hkv.serving.table_file import TableFile
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from torchrec_hkv.serving.following_worker import serve; serve(*sys.argv[2:])"
)
_END_SECONDS = 10.0


class ProcessFollower(Follower):
    """Applies a chain to a model by another process; :func:`follow` returns it."""

    def __init__(
        self, model: ServingModel, folder: Path, scratch: str | os.PathLike[str] | None
    ) -> None:
        super().__init__(model, folder, scratch)
        self._files = tempfile.TemporaryDirectory(prefix="torchrec_hkv-", dir=scratch)
        served_digest = model._version.checkpoint or ""
        arguments = [model.folder, model._save, folder.absolute(), self._files.name, served_digest]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def poll(self) -> int:
        applied = super().poll()
        self._clean_if_ended()
        return applied

    def rollback(self) -> None:
        super().rollback()
        self._clean_if_ended()

    def stop(self) -> None:
        super().stop()
        self._clean_if_ended()

    def _end(self) -> None:
        super()._end()
        self._process.kill()

    def _clean_if_ended(self) -> None:
        with self._lock:
            if not self._ended.is_set() or self._process.stdout.closed:
                return
            self._process.wait(_END_SECONDS)
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._files.cleanup()

    def _apply_new(self) -> int:
        applied = 0
        for message in self._answers():
            if self._ended.is_set():
                return 0
            began = time.monotonic()
            self._newest = message["newest"]
            version = self._read(message)
            self._switch(version, message["seconds"] + time.monotonic() - began)
            applied += 1
        return applied

    def _answers(self) -> Iterator[dict[str, Any]]:
        """Makes the process poll; yields its versions.

        Raises:
            ValueError: a checkpoint can't be applied, or the process has ended.
        """
        try:
            self._process.stdin.write(b'"poll"\n')
            self._process.stdin.flush()
        except OSError:
            pass  # the process has ended, so its output ends, too
        while line := self._process.stdout.readline():
            message = json.loads(line)
            if "error" in message:
                self._newest = message["newest"]
                raise ValueError(message["error"])
            if "file" not in message:
                self._newest = message["newest"]
                return
            yield message
        if not self._ended.is_set():
            status = self._process.wait(_END_SECONDS)
            raise ValueError(
                f"the process that reads {self.folder} has ended with status {status}: follow the "
                "chain again."
            )

    def _read(self, message: dict[str, Any]) -> ModelVersion:
        model, before, path = self._model, self._model._version, Path(message["file"])
        tensors = _ResidentTensors(path, model.device)
        tables = [
            _changed(table, table_places, tensors)
            for table, table_places in zip(self._bases(message), message["tables"], strict=True)
        ]
        if message["base_folder"] is not None:  # the files are mapped if they were needed
            shutil.rmtree(message["base_folder"])
        cores = before.cores
        if message["cores"] is not None:
            cores = [
                (group, [tensors.tensor(place) for place in places])
                for (group, _), places in zip(before.cores, message["cores"], strict=True)
            ]
        program = before.program
        if message["state"] is not None:
            state = {name: tensors.tensor(place) for name, place in message["state"].items()}
            program = program.with_state(state)
        path.unlink()
        return ModelVersion(
            ReadOnlyTables(tables, before.tables.counters, cores),
            cores,
            program,
            message["checkpoint"],
            message["number"],
            message["written"],
            message["base"],
        )

    def _bases(self, message: dict[str, Any]) -> list[ReadOnlyTable]:
        """The tables without changes, from the files of the version's base."""
        model, before = self._model, self._model._version
        tables = list(before.tables.tables)
        if message["base"] == before.base:
            return tables
        if message["base"] is None:
            manifest = ServingManifest.read(model.folder)
            return open_tables(
                model.folder, manifest, model._placement, before=before.tables.tables
            )
        folder = Path(message["base_folder"])
        for number, fields in enumerate(message["base_files"]):
            file = TableFile(**{**fields, "crc32": tuple(fields["crc32"])})
            index, rows = file.map(folder, model.resident)
            if model.device.type == "cpu" and not model.resident:
                warm(folder, [(file, index)])
            tables[number] = dataclasses.replace(
                tables[number],
                index=index,
                rows=rows,
                unit=file.unit,
                changed_index=None,
                changed_rows=None,
                changes=None,
            )
        return model._placement.place(tables, before.tables.tables)


def _changed(table: ReadOnlyTable, places: Any, tensors: _ResidentTensors) -> ReadOnlyTable:
    """A table with the changes in a message. None keeps its changes; no places removes them."""
    if places is None:
        return table
    index, rows = map(tensors.tensor, places) if places else (None, None)
    return dataclasses.replace(table, changed_index=index, changed_rows=rows, changes=None)


class _ResidentTensors:
    """Tensors of a file, in this process's memory."""

    def __init__(self, path: Path, device: torch.device) -> None:
        # Another process has just written the file, so it is in the page cache.
        data = read_resident(path, path.stat().st_size, direct=False)
        self._data = data if device.type == "cpu" else data.to(device)

    def tensor(self, place: tuple[int, str, list[int]]) -> Tensor:
        """The tensor at a place that :func:`following_worker.write_tensor` returned."""
        begin, name, shape = place
        dtype = getattr(torch, name)
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        return self._data[begin:end].view(dtype).view(shape)
