"""Follows a chain in another process.

That process serves the same model from the same folder, applies each checkpoint, and writes what
differs from the version before to a file. This process maps the file and switches to the version,
so that little of its time goes to Python: threads that call the model would have to wait for the
interpreter's lock.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from torchrec_hkv.serving import ops  # noqa: F401, registers what the program calls
from torchrec_hkv.serving.following import Follower, NextVersion
from torchrec_hkv.serving.manifest import Manifest
from torchrec_hkv.serving.model import ServingModel, Version, load, open_tables
from torchrec_hkv.serving.table_file import TableFile
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from torchrec_hkv.serving.following_process import serve; serve(*sys.argv[2:])"
)
_ALIGNMENT = 64
_NICENESS = 5
_END_SECONDS = 10.0


class ProcessFollower(Follower):
    """Applies a chain to a model by another process; :func:`follow` returns it."""

    def __init__(
        self, model: ServingModel, folder: Path, scratch: str | os.PathLike[str] | None
    ) -> None:
        super().__init__(model, folder, scratch)
        self._files = tempfile.TemporaryDirectory(prefix="torchrec_hkv-", dir=scratch)
        known = model._version.checkpoint or ""
        arguments = [model.folder, model._save, folder.absolute(), self._files.name, known]
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
        """Has the process poll; yields its versions.

        Raises:
            ValueError: a checkpoint can't be applied, or the process has ended.
        """
        try:
            self._process.stdin.write(b'"poll"\n')
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: its output ends, too
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

    def _read(self, message: dict[str, Any]) -> Version:
        model, before, path = self._model, self._model._version, Path(message["file"])
        held = _Held(path, model.device)
        tables = [
            _changed(table, its, held)
            for table, its in zip(self._bases(message), message["tables"], strict=True)
        ]
        if message["base_folder"] is not None:  # mapped, if they were needed
            shutil.rmtree(message["base_folder"])
        cores = before.cores
        if message["cores"] is not None:
            cores = [
                (group, [held.tensor(place) for place in places])
                for (group, _), places in zip(before.cores, message["cores"], strict=True)
            ]
        program = before.program
        if message["state"] is not None:
            state = {name: held.tensor(place) for name, place in message["state"].items()}
            program = program.with_state(state)
        path.unlink()
        return Version(
            ReadOnlyTables(tables, before.tables.counters, cores),
            cores,
            program,
            message["checkpoint"],
            message["number"],
            message["written"],
            message["base"],
        )

    def _bases(self, message: dict[str, Any]) -> list[ReadOnlyTable]:
        """The tables, with the files of the version's base."""
        model, before = self._model, self._model._version
        tables = list(before.tables.tables)
        if message["base"] == before.base:
            return tables
        if message["base"] is None:
            manifest = Manifest.read(model.folder)
            return open_tables(model.folder, manifest, model.device, model.resident)
        folder = Path(message["base_folder"])
        for number, fields in enumerate(message["base_files"]):
            file = TableFile(**{**fields, "crc32": tuple(fields["crc32"])})
            index, rows = file.map(folder, model.resident)
            tables[number] = dataclasses.replace(
                tables[number],
                index=index.to(model.device),
                rows=rows.to(model.device),
                unit=file.unit,
                changed_index=None,
                changed_rows=None,
                changes=None,
            )
        return tables


def _changed(table: ReadOnlyTable, its: Any, held: _Held) -> ReadOnlyTable:
    """A table with the changes of a message. None: as before; no places: without changes."""
    if its is None:
        return table
    index, rows = map(held.tensor, its) if its else (None, None)
    return dataclasses.replace(table, changed_index=index, changed_rows=rows, changes=None)


class _Held:
    """Tensors of a file, in this process's memory."""

    def __init__(self, path: Path, device: torch.device) -> None:
        size = path.stat().st_size
        data = torch.empty(0, dtype=torch.uint8)
        if size > 0:
            data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        is_cpu = device.type == "cpu"
        self._data = torch.ops.torchrec_hkv.serving_resident(data) if is_cpu else data.to(device)

    def tensor(self, place: tuple[int, str, list[int]]) -> Tensor:
        """The tensor at a place that :func:`_write` returned."""
        begin, name, shape = place
        dtype = getattr(torch, name)
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        return self._data[begin:end].view(dtype).view(shape)


def _write(file: BinaryIO, tensor: Tensor) -> tuple[int, str, list[int]]:
    """Appends a tensor to a file; returns its place."""
    begin = file.tell()
    begin += -begin % _ALIGNMENT
    file.seek(begin)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    file.write(flat.view(torch.uint8).numpy())
    return begin, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


# -- in the other process -------------------------------------------------------------------------


def serve(folder: str, save: str, chain: str, scratch: str, known: str) -> None:
    """Runs in the other process until its input ends.

    Args:
        folder: folder of the model.
        save: id of the export that the model was loaded from.
        chain: folder of the chain.
        scratch: folder for files that the follower reads and removes.
        known: digest of the checkpoint that the follower serves, or "".
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    os.nice(_NICENESS)
    torch.set_num_threads(1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    publisher: _Publisher | None = None
    with tempfile.TemporaryDirectory(prefix="versions-", dir=scratch) as own:
        for _ in sys.stdin:
            try:
                if publisher is None:
                    publisher = _Publisher(folder, save, Path(chain), Path(own), known, answer)
                publisher.poll_and_send()
                error, newest = publisher.error, publisher.newest
            except (ValueError, OSError) as raised:
                error, newest = str(raised), None
            answer({"newest": newest} | ({} if error is None else {"error": error}))


class _Publisher(Follower):
    """Applies a chain to a model in this process, and sends each version."""

    def __init__(
        self,
        folder: str,
        save: str,
        chain: Path,
        scratch: Path,
        known: str,
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        model = load(folder)
        if model._save != save:
            raise ValueError(f"{folder} has been exported again: load the model again.")
        super().__init__(model, chain, scratch)
        self._known, self._send, self._scratch_folder = known, send, scratch
        self._sent: Version | None = None
        self._catches_up = True
        self._seconds = 0.0
        self._base: tuple[Path, list[TableFile]] | None = None

    @property
    def newest(self) -> int | None:
        """Number of the newest checkpoint of the chain."""
        return self._newest

    def poll_and_send(self) -> None:
        """Applies new checkpoints. Of those of the first poll, only the last one is sent: the
        follower serves some of them already, or will serve the last one in a moment."""
        self.poll()
        version = self._model._version
        if self._catches_up and self.error is None and version.checkpoint != (self._known or None):
            self._write_version(version)
        self._catches_up = False

    def _build(self, folder: Path, digest: str) -> Version:
        model = self._model
        following = NextVersion(model._version, folder, digest, model.device, model.resident)
        into = self._scratch_folder / folder.name
        into.mkdir(exist_ok=True)
        version = following.version(into)
        if following.files:
            self._base = into, following.files
        else:
            into.rmdir()
        return version

    def _switch(self, version: Version, seconds: float) -> None:
        super()._switch(version, seconds)
        self._seconds = seconds
        if not self._catches_up:
            self._write_version(version)

    def _write_version(self, version: Version) -> None:
        before, self._sent = self._sent, version
        path = self._scratch_folder / f"version-{version.number}"
        is_new_base = before is None or before.base != version.base
        with open(path, "wb") as file:
            tables: list[Any] = []
            for number, table in enumerate(version.tables.tables):
                was = None if before is None else before.tables.tables[number]
                if not is_new_base and table.changed_index is was.changed_index:
                    tables.append(None)
                elif table.changed_index is None:
                    tables.append([])
                else:
                    its = table.changed_index, table.changed_rows
                    tables.append([_write(file, tensor) for tensor in its])
            cores = [[_write(file, core) for core in its] for _, its in version.cores]
            state = None
            if before is None or version.program is not before.program:
                state = {name: _write(file, its) for name, its in version.program.state.items()}
        message = {
            "file": str(path),
            "newest": self._newest,
            "checkpoint": version.checkpoint,
            "number": version.number,
            "written": version.written,
            "base": version.base,
            "tables": tables,
            "cores": cores,
            "state": state,
            "seconds": self._seconds,
            "base_folder": None,
        }
        if is_new_base and self._base is not None:
            folder, files = self._base
            message["base_folder"] = str(folder)
            message["base_files"] = [dataclasses.asdict(its) for its in files]
        self._send(message)
