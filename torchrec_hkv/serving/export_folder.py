"""Writes the folder of an exported model beside the old one, then replaces it in one step."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from torchrec_hkv.checkpoint.exchange import exchange
from torchrec_hkv.file_sync import sync_folder


class ExportFolder:
    """The folder that an export writes.

    Args:
        target: the folder of the model after the export.
    """

    def __init__(self, target: Path) -> None:
        self._target = target.absolute()
        #: The folder to write to.
        self.path = self._target.with_name(f".{self._target.name}.saving")
        self._locks: list[int] = []

    def open(self) -> None:
        """Creates the folder, empty, and locks it for this process.

        Raises:
            ValueError: another process exports to the same folder.
        """
        while not self._locks:
            self.path.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(folder)
                raise ValueError(
                    f"another process exports to {self._target}: wait for its end, or name "
                    "another folder."
                ) from None
            # The other process may have finished meanwhile and renamed its folder.
            if self.path.exists() and os.path.samestat(os.stat(self.path), os.fstat(folder)):
                self._locks.append(folder)
            else:
                os.close(folder)
        for leftover in self.path.iterdir():  # left by a killed export
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def replace(self) -> None:
        """Moves the folder to its final path. If the file system can exchange two folders, an
        earlier model is readable at every moment."""
        sync_folder(self.path)
        if self._target.exists():  # the exchange gives the earlier model this name; it is removed
            before = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(before, fcntl.LOCK_EX)
            self._locks.append(before)
        if not (self._target.exists() and exchange(self.path, self._target)):
            previous = self._target.with_name(f".{self._target.name}.previous")
            shutil.rmtree(previous, ignore_errors=True)
            if self._target.exists():
                self._target.rename(previous)
            self.path.rename(self._target)
            shutil.rmtree(previous, ignore_errors=True)
        sync_folder(self._target.parent)

    def close(self) -> None:
        """Removes the remains of a failed export or of the earlier model, and unlocks the
        folder."""
        if self._locks:
            shutil.rmtree(self.path, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())
