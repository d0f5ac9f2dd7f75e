"""Applies the deltas of a chain to a served model.

A version of a model is immutable. A delta creates the next version: its rows and erased ids form a
layer over the tables' files, and dense parameters are copied. The model then switches to that
version in one step. Running calls finish with the version that they started with.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

from torch import Tensor

from torchrec_hkv.checkpoint.chain import Chain, digest_of
from torchrec_hkv.serving.model import Freshness, ModelVersion, ServingModel
from torchrec_hkv.serving.next_version import NextVersion
from torchrec_hkv.serving.tables import ServingHotRows


def follow(
    model: ServingModel,
    folder: str | os.PathLike[str],
    *,
    every: float | None = 1.0,
    scratch: str | os.PathLike[str] | None = None,
    process: bool | None = None,
) -> Follower:
    """Applies the checkpoints that a ``DeltaWriter`` writes while the model serves.

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
        process: whether another process reads and merges checkpoints, so that calls of the model
            don't wait for the interpreter meanwhile. The process takes some seconds to start and
            memory for another copy of the changed rows, has a low priority, and passes each version
            through a file in ``scratch``. None: True if a thread polls.

    Raises:
        ValueError: the model follows another chain, its tables can't follow, or ``every`` is not
            positive; or the chain's newest checkpoint can't be applied.
    """
    if every is not None and not every > 0:
        raise ValueError(f"every is {every!r}, but must be positive, or None.")
    if model._follower is not None and model._follower.is_following:
        raise ValueError(f"the model already follows {model._follower.folder}: stop that first.")
    if process is None:
        process = every is not None
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
        self._previous: ModelVersion | None = None
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
            Number of checkpoints applied; 0 if following has ended, or ends now with an
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
            with self._model._switching:
                self._model.switch(self._previous)
                self._previous = None
            self._end()

    def stop(self) -> None:
        """Stops following. The model keeps serving its current version."""
        self._end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def freshness(self, version: ModelVersion, age: float | None) -> Freshness:
        """Freshness of a version of the model."""
        behind = None
        if self._newest is not None and version.number is not None:
            behind = max(0, self._newest - version.number)
        return Freshness(
            version.number, age, behind, self.is_following, self.error, self._apply_seconds
        )

    def use_hot_rows(self, rows: Tensor, hot: ServingHotRows) -> None:
        """Uses other hot rows in the previous version, too. The model calls this."""
        if self._previous is not None:
            self._previous = self._previous.with_hot_rows(rows, hot)

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
                # If there is a newer base, the writer may have removed a checkpoint while it was
                # read.
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

    def _build(self, folder: Path, digest: str) -> ModelVersion:
        model = self._model
        following = NextVersion(model._version, folder, digest, model._placement)
        # A mapped file exists until it is unmapped, so a killed process leaves no files.
        with tempfile.TemporaryDirectory(prefix="torchrec_hkv-", dir=self._scratch) as scratch:
            return following.version(Path(scratch))

    def _switch(self, version: ModelVersion, seconds: float) -> None:
        with self._model._switching:
            self._previous = self._model.switch(version)
        self._apply_seconds = seconds
