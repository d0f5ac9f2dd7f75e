"""The manifest of an exported model, ``serving.json``: its tables, its program and its inputs."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_hkv.hash_table.files.manifest import CRC32, SAVE_ID
from torchrec_hkv.hash_table.files.signed_json import read_signed, write_signed
from torchrec_hkv.json_schema import (
    Choice,
    Fields,
    Flag,
    Integer,
    Items,
    Number,
    OrNull,
    Place,
    Plain,
    Text,
)
from torchrec_hkv.serving.row_formats import ROW_FORMATS
from torchrec_hkv.serving.table_file import TableFile

MANIFEST = "serving.json"
_FORMAT = "torchrec_hkv.serving"
_VERSION = 1
_MOST = 1 << 53
_NAME = Text(r"[\w.-]+", "the name of a file")


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file of the model.

    Attributes:
        file: its name.
        bytes: its size.
        crc32: its checksum.
    """

    file: str
    bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """That of a file that has been written."""
        return cls(path.name, path.stat().st_size, _crc32(path))

    def check(self, folder: Path) -> None:
        """Refuses a file that is missing or another one.

        Raises:
            ValueError: naming the file.
        """
        path = folder / self.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        if size != self.bytes or _crc32(path) != self.crc32:
            raise ValueError(f"{path} is damaged: its size or its checksum is not the manifest's.")


@dataclasses.dataclass(frozen=True)
class Initial:
    """What unknown ids get, as an op takes it.

    Attributes:
        seed: mixed with the table's name.
        distribution: ``"uniform"`` or ``"normal"``.
        low, high: bounds; those of a normal may be infinite, which is None here.
        mean, std: of the normal.
    """

    seed: int
    distribution: str
    low: float | None
    high: float | None
    mean: float
    std: float

    def arguments(self) -> dict[str, Any]:
        """Of :class:`torchrec_hkv.serving.tables.ReadOnlyTable`."""
        inf = float("inf")
        return {
            "distribution": self.distribution,
            "low": -inf if self.low is None else self.low,
            "high": inf if self.high is None else self.high,
            "mean": self.mean,
            "std": self.std,
        }


@dataclasses.dataclass(frozen=True)
class TableRecord:
    """A table of rows.

    Attributes:
        name: its full name in the model.
        rows: its file.
        initial: the row that an unknown id gets, as a function of the id.
        default_row: or this one for all; None: not.
    """

    name: str
    rows: TableFile
    initial: Initial
    default_row: Sequence[float] | None


@dataclasses.dataclass(frozen=True)
class ShapeRecord:
    """Arguments of a :class:`torchrec_hkv.tensor_train.TTShape`."""

    num_embeddings: int
    embedding_dim: int
    p: Sequence[int]
    q: Sequence[int]
    ranks: Sequence[int]


@dataclasses.dataclass(frozen=True)
class TTGroupRecord:
    """Tensor-Train tables that are looked up in one call.

    Attributes:
        names: full names of the tables.
        shapes: theirs.
        feature_tables: for each output, its table's number in the group.
        dtype: of the cores.
        cores: the file of all cores, one after the other.
    """

    names: Sequence[str]
    shapes: Sequence[ShapeRecord]
    feature_tables: Sequence[int]
    dtype: str
    cores: FileRecord


@dataclasses.dataclass(frozen=True)
class InputRecord:
    """One leaf of the model's arguments.

    Attributes:
        kind: ``"tensor"``, ``"ids"`` (a ``KeyedJaggedTensor`` in training) or ``"constant"``.
        keys: of ids, their features in order.
        is_weighted: whether ids have weights.
        value: of a constant.
    """

    kind: str
    keys: Sequence[str]
    is_weighted: bool
    value: Any


@dataclasses.dataclass(frozen=True)
class Manifest:
    """An exported model.

    Attributes:
        save: an id of the export.
        tables: of rows, in the order that the program numbers them in.
        tensor_train: groups of Tensor-Train tables, in that order, too.
        program: written by :func:`torch.export.save`.
        tree: the structure of positional and keyword arguments, as PyTorch's pytree writes it.
        inputs: their leaves.
        checkpoint: digest of the checkpoint of a chain that holds the same model; None: not known.
        package: the program as an AOTInductor package; None: there is none.
    """

    save: str
    tables: Sequence[TableRecord]
    tensor_train: Sequence[TTGroupRecord]
    program: FileRecord
    tree: str
    inputs: Sequence[InputRecord]
    checkpoint: str | None
    package: FileRecord | None = None

    def write(self, folder: Path) -> None:
        """Writes it, and makes sure that it is on the disk."""
        write_signed(folder / MANIFEST, _FORMAT, _VERSION, dataclasses.asdict(self), mode="x")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """That of a model.

        Raises:
            ValueError: it is missing, damaged, of another version, or has an impossible value.
        """
        path = folder / MANIFEST
        try:
            content = read_signed(path, _FORMAT, _VERSION, "an exported model")
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        return _MANIFEST.read(content, Place(str(path)))


def _crc32(path: Path) -> int:
    total = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            total = zlib.crc32(piece, total)
    return total


_COUNT = Integer(0, _MOST)
_SIZE = Integer(1, _MOST)
_FILE = Fields({"file": _NAME, "bytes": _COUNT, "crc32": CRC32}, FileRecord)
_TABLE_FILE = Fields(
    {
        "file": _NAME,
        "entries": _COUNT,
        "blocks": _SIZE,
        "block_buckets": _SIZE,
        "dim": _SIZE,
        "row_format": Choice(ROW_FORMATS),
        "unit": Number(0),
        "crc32": Items(CRC32),
    },
    TableFile,
)
_INITIAL = Fields(
    {
        "seed": Integer(-(1 << 63), (1 << 63) - 1),
        "distribution": Choice(("uniform", "normal")),
        "low": OrNull(Number()),
        "high": OrNull(Number()),
        "mean": Number(),
        "std": Number(),
    },
    Initial,
)
_TABLE = Fields(
    {
        "name": Text(),
        "rows": _TABLE_FILE,
        "initial": _INITIAL,
        "default_row": OrNull(Items(Number())),
    },
    TableRecord,
)
_SHAPE = Fields(
    {
        "num_embeddings": _SIZE,
        "embedding_dim": _SIZE,
        "p": Items(_SIZE),
        "q": Items(_SIZE),
        "ranks": Items(_SIZE),
    },
    ShapeRecord,
)
_TT_GROUP = Fields(
    {
        "names": Items(Text()),
        "shapes": Items(_SHAPE),
        "feature_tables": Items(_COUNT),
        "dtype": Choice(("float32", "bfloat16")),
        "cores": _FILE,
    },
    TTGroupRecord,
)
_INPUT = Fields(
    {
        "kind": Choice(("tensor", "ids", "constant")),
        "keys": Items(Text()),
        "is_weighted": Flag(),
        "value": Plain(),
    },
    InputRecord,
)
_MANIFEST = Fields(
    {
        "save": SAVE_ID,
        "tables": Items(_TABLE),
        "tensor_train": Items(_TT_GROUP),
        "program": _FILE,
        "tree": Text(),
        "inputs": Items(_INPUT),
        "checkpoint": OrNull(Text(r"[0-9a-f]{64}", "64 hexadecimal digits")),
        "package": OrNull(_FILE),
    },
    Manifest,
    optional=("package",),
)
