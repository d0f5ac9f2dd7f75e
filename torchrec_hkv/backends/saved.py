"""What backends and checkpoints say to each other of saved tables."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from torchrec_hkv.hash_table.files.zstd_files import zstandard
from torchrec_hkv.write_behind import SaveHandle

#: Names of tensors of a state that are no entries begin so. They are uint8 of one dimension, and
#: belong to shards of the first column.
COUNTS = "counts_"


@dataclasses.dataclass(frozen=True)
class SavedShard:
    """A shard of a table in a checkpoint, whatever the sharding of the table was.

    Attributes:
        folder: that :meth:`GroupLookup.save_files` wrote.
        owners: first owner bucket of the ids that the shard was asked for, and the one past the
            last; of 65,536.
        earlier: where the folder holds only what changed since an earlier save: the folders of
            earlier ones, the newest first, the last one whole.
    """

    folder: Path
    owners: tuple[int, int]
    earlier: tuple[Path, ...] = ()


@dataclasses.dataclass(frozen=True)
class SavedFolder:
    """What the folder of a saved shard says of itself.

    Attributes:
        save: the id of the save, as :attr:`FileOptions.save` was.
        entries: in all of its files.
        crc32: checksum of what names all of its files with theirs.
        columns: the first column, and the one past the last.
        files: names of the files.
        is_whole: whether they hold the whole shard, or only what changed since an earlier save.
    """

    save: str
    entries: int
    crc32: int
    columns: tuple[int, int]
    files: tuple[str, ...]
    is_whole: bool = True


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """How files of tables are written and read.

    Attributes:
        batch_bytes: memory it may take, on the host and on the device.
        threads: that write or read files at the same time.
        allow_loss: load also into tables that have too little room; what ranks lowest is left out.
            None: only where the table has as many rows as the saved one, over all ranks.
        save: an id of the save, the same for all tables; None in a load.
        states: whether optimizer states are written.
        row_dtype: float16 or bfloat16, which rows of 32 bits are rounded to when they are written,
            or int8 for codes of 8 bits with a scale a row; None to write all bits.
        compression: ``"zstd"`` to compress files of entries, or None.
        handle: of a save that does not block: all that a table holds is copied when a backend's
            method returns, and the handle's threads may write it (:meth:`SaveHandle.defer`).

    Raises:
        ValueError: one of the numbers is not positive, ``row_dtype`` or ``compression`` is another,
            or the package that compresses is not installed.
    """

    batch_bytes: int
    threads: int
    allow_loss: bool | None = None
    save: str | None = None
    states: bool = True
    row_dtype: torch.dtype | None = None
    compression: Literal["zstd"] | None = None
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
class Placed:
    """What became of the entries that a table was asked to load.

    Attributes:
        entries: in the files.
        lost: of these, how many found no place.
    """

    entries: int = 0
    lost: int = 0

    def __add__(self, other: Placed) -> Placed:
        return Placed(self.entries + other.entries, self.lost + other.lost)


class TablesLoad(abc.ABC):
    """Tables of one group that are going to be replaced by saved ones."""

    @abc.abstractmethod
    def check(self) -> None:
        """Refuses what can't be loaded, before anything changes.

        Raises:
            ValueError: one sentence naming the table, what is saved and what is needed.
        """

    @abc.abstractmethod
    def run(self) -> Mapping[str, Placed]:
        """Loads them; returns what became of the entries, by the keys of shards.

        Raises:
            ValueError: files contradict themselves, or entries found no place that were expected
                to; the table is left empty then.
        """


class EntriesLoad(abc.ABC):
    """A table that is going to be filled from the state of all shards of a saved one."""

    @abc.abstractmethod
    def check(self, table_state: torch.Tensor) -> None:
        """Refuses a state before anything changes.

        Args:
            table_state: the tensor of that name, of the first shard.

        Raises:
            ValueError: it can't be loaded.
        """

    @abc.abstractmethod
    def load_same(self, table_state: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads the tensors of a shard of the same rows and columns, all of them."""

    @abc.abstractmethod
    def begin(self, table_state: torch.Tensor) -> None:
        """Empties the table, to be filled entry by entry."""

    @abc.abstractmethod
    def put(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Takes those entries whose ids the table is asked for.

        Args:
            entries: by the names of its state, with the columns of the table's own shard.
        """

    @abc.abstractmethod
    def put_counts(self, name: str, first: int, part: torch.Tensor) -> None:
        """Takes a part of a tensor that holds no entries, after all entries.

        Args:
            name: of the tensor, which begins with :data:`COUNTS`.
            first: the part's first byte in the tensor of a shard.
            part: uint8 ``[n]``, a multiple of 128 bytes but for a tensor's last part.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Ends what :meth:`begin` began.

        Raises:
            ValueError: entries found no place; the table is left empty.
        """
