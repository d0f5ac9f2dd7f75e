"""The process that applies a chain for a follower in another process (``following_process.py``).

It opens the same model from the same folder, applies each checkpoint, and writes the differences
from the previous version to a file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from torchrec_hkv.serving.following import Follower
from torchrec_hkv.serving.model import ModelVersion, load
from torchrec_hkv.serving.next_version import NextVersion
from torchrec_hkv.serving.table_file import TableFile

_ALIGNMENT = 64
_NICENESS = 5


def write_tensor(file: BinaryIO, tensor: Tensor) -> tuple[int, str, list[int]]:
    """Appends a tensor to a file; returns its place."""
    begin = file.tell()
    begin += -begin % _ALIGNMENT
    file.seek(begin)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    file.write(flat.view(torch.uint8).numpy())
    return begin, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def serve(folder: str, save: str, chain: str, scratch: str, served_digest: str) -> None:
    """Applies a chain until the input ends. Runs in a process of its own.

    Args:
        folder: folder of the model.
        save: id of the export that the model was loaded from.
        chain: folder of the chain.
        scratch: folder for files that the follower reads and removes.
        served_digest: digest of the checkpoint that the follower serves, or "".
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps other output out of the answers
    os.nice(_NICENESS)
    torch.set_num_threads(1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    publisher: _Publisher | None = None
    with tempfile.TemporaryDirectory(prefix="versions-", dir=scratch) as versions_folder:
        for _ in sys.stdin:
            try:
                if publisher is None:
                    publisher = _Publisher(
                        folder, save, Path(chain), Path(versions_folder), served_digest, answer
                    )
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
        served_digest: str,
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        model = load(folder)
        if model._save != save:
            raise ValueError(f"{folder} has been exported again: load the model again.")
        super().__init__(model, chain, scratch)
        self._served_digest, self._send, self._scratch_folder = served_digest, send, scratch
        self._last_version: ModelVersion | None = None
        self._catches_up = True
        self._seconds = 0.0
        self._base: tuple[Path, list[TableFile]] | None = None

    @property
    def newest(self) -> int | None:
        """Number of the newest checkpoint of the chain."""
        return self._newest

    def poll_and_send(self) -> None:
        """Applies new checkpoints. The first poll sends only the last version: the follower already
        serves some of the others, or will serve the last one soon."""
        self.poll()
        version = self._model._version
        if (
            self._catches_up
            and self.error is None
            and version.checkpoint != (self._served_digest or None)
        ):
            self._write_version(version)
        self._catches_up = False

    def _build(self, folder: Path, digest: str) -> ModelVersion:
        model = self._model
        following = NextVersion(model._version, folder, digest, model._placement)
        into = self._scratch_folder / folder.name
        into.mkdir(exist_ok=True)
        version = following.version(into)
        if following.files:
            self._base = into, following.files
        else:
            into.rmdir()
        return version

    def _switch(self, version: ModelVersion, seconds: float) -> None:
        super()._switch(version, seconds)
        self._seconds = seconds
        if not self._catches_up:
            self._write_version(version)

    def _write_version(self, version: ModelVersion) -> None:
        before, self._last_version = self._last_version, version
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
                    changes = table.changed_index, table.changed_rows
                    tables.append([write_tensor(file, tensor) for tensor in changes])
            cores = [[write_tensor(file, core) for core in changes] for _, changes in version.cores]
            state = None
            if before is None or version.program is not before.program:
                state = {
                    name: write_tensor(file, changes)
                    for name, changes in version.program.state.items()
                }
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
            message["base_files"] = [dataclasses.asdict(changes) for changes in files]
        self._send(message)
