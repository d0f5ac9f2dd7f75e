"""Types that backends and checkpoints exchange about saved tables."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from torchrec_hkv.hash_table.files.zstd_files import zstandard
from torchrec_hkv.write_behind import SaveHandle

#: Prefix of the names of state tensors that hold no entries. Such tensors are one-dimensional
#: uint8, and only shards that hold the first column have them.
COUNTS = "counts_"


@dataclasses.dataclass(frozen=True)
class SavedShard:
    """A shard of a table in a checkpoint. The saved table may have been sharded in any way.

    Attributes:
        folder: the folder that :meth:`GroupLookup.save_files` wrote.
        owners: range ``[first, end)`` of owner buckets, of 65,536, whose ids the shard held.
        earlier: for a folder that holds only the changes since an earlier save: the folders of
            the earlier saves, the newest first. The last one is whole.
    """

    folder: Path
    owners: tuple[int, int]
    earlier: tuple[Path, ...] = ()


@dataclasses.dataclass(frozen=True)
class SavedFolder:
    """The contents of a saved shard's folder according to its manifest.

    Attributes:
        save: id of the save, :attr:`FileOptions.save`.
        entries: number of entries in all files.
        crc32: checksum of the manifest, which lists all files with their checksums.
        columns: range ``[first, end)`` of columns.
        files: names of the files.
        is_whole: True if the files hold the whole shard, False if they hold only what changed
            since an earlier save.
        entry_files: names of the files that a load verifies itself with
            :attr:`FileOptions.verify`.
    """

    save: str
    entries: int
    crc32: int
    columns: tuple[int, int]
    files: tuple[str, ...]
    is_whole: bool = True
    entry_files: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """How files of tables are written and read.

    Attributes:
        batch_bytes: memory limit of the operation in bytes, on the host and on the device each.
        threads: number of threads that write or read files.
        allow_loss: True: load into smaller tables too and drop the entries that rank lowest.
            False: raise when an entry finds no slot. None: drop entries only if the table has as
            many rows over all ranks as the saved one.
        save: id of the save, the same for all tables; None when loading.
        states: whether optimizer states are written.
        row_dtype: float16 or bfloat16, to which rows of 32 bits are rounded when they are written,
            or int8 for codes of 8 bits with one scale per row; None to write all bits.
        compression: ``"zstd"`` to compress files of entries, or None.
        verify: whether a load verifies :attr:`SavedFolder.entry_files` while it reads them. If
            False, they have been verified before.
        handle: handle of a non-blocking save. When the backend's method returns, the table's
            contents are copied; the handle's threads may write them later
            (:meth:`SaveHandle.defer`).

    Raises:
        ValueError: a number is not positive, another field has a value that is not allowed, or the
            package for the compression is not installed.
    """

    batch_bytes: int
    threads: int
    allow_loss: bool | None = None
    save: str | None = None
    states: bool = True
    row_dtype: torch.dtype | None = None
    compression: Literal["zstd"] | None = None
    verify: bool = False
    handle: SaveHandle | None = None

    def __post_init__(self) -> None:
        for what, value in (("batch_bytes", self.batch_bytes), ("threads", self.threads)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{what} is {value!r}, but must be an integer, at least 1.")
        if self.allow_loss not in (None, True, False):
            raise ValueError(f"allow_loss is {self.allow_loss!r}, but must be True, False or None.")
        if not isinstance(self.states, bool):
            raise ValueError(f"states is {self.states!r}, but must be True or False.")
        if self.row_dtype not in (None, torch.float16, torch.bfloat16, torch.int8):
            raise ValueError(
                f"row_dtype is {self.row_dtype!r}, but must be torch.float16, torch.bfloat16, "
                "torch.int8 or None."
            )
        if self.compression not in (None, "zstd"):
            raise ValueError(f"compression is {self.compression!r}, but must be 'zstd' or None.")
        if self.compression is not None:
            zstandard("compression='zstd'")


@dataclasses.dataclass(frozen=True)
class LoadCounts:
    """How many entries a load read, and how many of them it dropped.

    Attributes:
        entries: entries in the files.
        lost: entries that found no slot.
    """

    entries: int = 0
    lost: int = 0

    def __add__(self, other: LoadCounts) -> LoadCounts:
        return LoadCounts(self.entries + other.entries, self.lost + other.lost)


class TablesLoad(abc.ABC):
    """A load that replaces tables of one group by saved ones."""

    @abc.abstractmethod
    def check(self) -> None:
        """Checks everything that can be checked before the tables change.

        Raises:
            ValueError: a table can't be loaded. The message names the table, what is saved and
                what is needed.
        """

    @property
    def bytes(self) -> int:
        """About how many bytes :meth:`run` reads, for a progress bar; 0, the default, if unknown.
        Called after :meth:`check`."""
        return 0

    @abc.abstractmethod
    def run(self) -> Mapping[str, LoadCounts]:
        """Loads the tables.

        Returns:
            Numbers of loaded and of dropped entries, by shard key.

        Raises:
            ValueError: the files are inconsistent, or entries found no slot although none may be
                lost. The table is empty afterwards.
        """

    def undo(self) -> None:
        """Empties the tables of a group again, as they were before the load. Called if :meth:`run`
        with :attr:`FileOptions.verify` has failed on a rank."""
        raise NotImplementedError


class EntriesLoad(abc.ABC):
    """A load that fills a table from the state tensors of all shards of a saved table."""

    @abc.abstractmethod
    def check(self, table_state: torch.Tensor) -> None:
        """Checks a state before the table changes.

        Args:
            table_state: the tensor ``"table_state"`` of the saved table's first shard.

        Raises:
            ValueError: the state can't be loaded.
        """

    @abc.abstractmethod
    def load_same(self, table_state: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads all tensors of a saved shard that has the same rows and columns as this one."""

    @abc.abstractmethod
    def begin(self, table_state: torch.Tensor) -> None:
        """Empties the table. Calls of :meth:`put` follow."""

    @abc.abstractmethod
    def put(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Inserts the entries whose ids belong to this shard; skips all others.

        Args:
            entries: tensors of the state by name, with the columns of this shard.
        """

    @abc.abstractmethod
    def put_counts(self, name: str, first: int, part: torch.Tensor) -> None:
        """Takes a part of a tensor that holds no entries. Called after all :meth:`put`.

        Args:
            name: name of the tensor; begins with :data:`COUNTS`.
            first: offset of the part in the shard's tensor, in bytes.
            part: uint8 ``[n]``. ``n`` is a multiple of 128, except in a tensor's last part.
        """

    @abc.abstractmethod
    def finish(self, *, allow_loss: bool = False) -> int:
        """Ends the load that :meth:`begin` started.

        Args:
            allow_loss: whether entries may have found no slot.

        Returns:
            Number of entries that found no slot.

        Raises:
            ValueError: entries found no slot, which is not allowed; the table is empty afterwards.
        """
