"""A table's own files in a checkpoint, and the changes since an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torchrec_hkv.backends.save_types import FileOptions, SavedFolder, SavedShard, TablesLoad
from torchrec_hkv.backends.specs import BackendOptions


class FilesLookup:
    """Writes and reads the files of each table of a group."""

    def unchanged(self) -> AbstractContextManager[None]:
        """A context in which the tables do not change: calls of other threads that would change
        them wait.

        Checkpoints are saved in it. The default does not lock anything.
        """
        return nullcontext()

    def save_files(self, key: str, folder: Path, options: FileOptions) -> None:
        """Writes a shard to a new folder, in bounded memory. Called if :meth:`Backend.saves_files`.

        Raises:
            OSError: writing failed.
        """
        raise NotImplementedError

    def saved_bytes(self, key: str) -> int:
        """About how many bytes :meth:`save_files` writes for a shard, for a progress bar; 0, the
        default, if unknown."""
        return 0

    def change_tracker(self, key: str) -> Any:
        """A tracker of the entries of a shard that changed since its last save with the tracker,
        for :meth:`save_changes`; None, the default, if the backend does not track changes.

        A tracker has two methods. After ``forget()`` all entries count as changed, as they do
        initially. ``see(folder, states, row_dtype)`` is called after a shard was loaded from a
        folder: changes count from then on. It returns False if that is impossible.
        """
        return None

    def save_changes(self, key: str, folder: Path, options: FileOptions, tracker: Any) -> None:
        """Like :meth:`save_files`, but writes only the entries that changed since the last call
        with this tracker, if the tracker knows them. :attr:`SavedFolder.is_whole` tells which it
        wrote.

        Args:
            key: the shard.
            folder: the new folder.
            options: how to write it.
            tracker: the :meth:`change_tracker` of the same shard.
        """
        raise NotImplementedError

    def is_untouched(self) -> bool:
        """Whether the tables are empty and have not been used. If True, a load verifies files while
        it reads them (:attr:`FileOptions.verify`), because it can be undone
        (:meth:`TablesLoad.undo`). If False, the default, all files are verified before anything
        changes."""
        return False

    def open_files(
        self,
        saved: Mapping[str, tuple[Sequence[SavedShard], tuple[int, int]]],
        options: FileOptions,
    ) -> TablesLoad:
        """Starts a load of all tables of the group whose :meth:`Backend.saves_files` is True.

        Args:
            saved: by shard key: all shards of the saved table, and the range ``[first, end)`` of
                owner buckets whose ids the shard to load holds.
            options: how to read the files.
        """
        raise NotImplementedError

    def digest(self, key: str) -> tuple[int, int]:
        """Number of entries of a shard, and a sum of hashes of their values. Called if
        :meth:`Backend.saves_files`.

        The sums over all shards of a table do not depend on the sharding. Column shards that do
        not hold the first column count 0 entries.
        """
        raise NotImplementedError


class FilesBackend:
    """Tells which tables have files, and reads those of saved tables."""

    def saves_files(self, options: BackendOptions) -> bool:
        """Whether checkpoints store a table in its own files (:meth:`GroupLookup.save_files`),
        written in bounded memory and loadable under any sharding. Otherwise its state is in the
        ``state_dict``."""
        return False

    def saved_folder(self, folder: Path) -> SavedFolder:
        """Reads the manifest of a shard's folder. :meth:`verify_file` reads the files it lists.

        Raises:
            ValueError: the folder is damaged.
        """
        raise NotImplementedError

    def merge_files(self, layers: Sequence[Path], folder: Path, options: FileOptions) -> None:
        """Merges a whole shard and later changes of it into a new folder.

        Args:
            layers: folders written by :meth:`GroupLookup.save_changes`, the newest first; the last
                one is whole.
            folder: folder to write. Its manifest equals that of the newest layer, except that it
                is whole.
            options: how to write the files.

        Raises:
            ValueError: a folder is damaged.
            OSError: writing failed.
        """
        raise NotImplementedError

    def verify_file(self, saved: SavedShard, file: str, options: FileOptions) -> None:
        """Reads a file of a shard's folder and checks it.

        Raises:
            ValueError: the file is missing or damaged, holds an id twice, or holds ids of other
                owner buckets than the shard's. The message names the file.
        """
        raise NotImplementedError
