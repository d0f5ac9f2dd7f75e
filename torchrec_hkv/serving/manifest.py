"""The manifest of an exported model, ``serving.json``: its tables, its program and its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_hkv import checksums
from torchrec_hkv.hash_table.files.manifest import CRC32, SAVE_ID
from torchrec_hkv.hash_table.files.signed_json import read_signed, write_signed
from torchrec_hkv.json_schema import (
    Choice,
    Fields,
    Flag,
    Integer,
    Items,
    JsonPlace,
    Number,
    OrNull,
    Plain,
    Text,
)
from torchrec_hkv.serving.row_formats import ROW_FORMATS
from torchrec_hkv.serving.table_file import TableFile

MANIFEST = "serving.json"
_FORMAT = "torchrec_hkv.serving"
_VERSION = 1
_MAX = 1 << 53
_NAME = Text(r"[\w.-]+", "the name of a file")


@dataclasses.dataclass(frozen=True)
class ServingFileRecord:
    """A file of the model.

    Attributes:
        file: name of the file.
        bytes: size of the file.
        crc32: checksum of the file.
    """

    file: str
    bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> ServingFileRecord:
        """The record of a file on the disk."""
        return cls(path.name, path.stat().st_size, _crc32(path))

    def check(self, folder: Path) -> None:
        """Checks that the file is there and undamaged.

        Raises:
            ValueError: the file is missing or differs. The message names it.
        """
        path = folder / self.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        if size != self.bytes or _crc32(path) != self.crc32:
            raise ValueError(f"{path} is damaged: its size or checksum is not the manifest's.")


@dataclasses.dataclass(frozen=True)
class Initial:
    """Initial rows of unknown ids, as arguments of an op.

    Attributes:
        seed: seed, mixed with the table's name.
        distribution: ``"uniform"`` or ``"normal"``.
        low, high: bounds, or None for an infinite bound of a normal distribution.
        mean, std: mean and standard deviation of a normal distribution.
    """

    seed: int
    distribution: str
    low: float | None
    high: float | None
    mean: float
    std: float

    def arguments(self) -> dict[str, Any]:
        """Arguments of :class:`torchrec_hkv.serving.tables.ReadOnlyTable`."""
        inf = float("inf")
        return {
            "distribution": self.distribution,
            "low": -inf if self.low is None else self.low,
            "high": inf if self.high is None else self.high,
            "mean": self.mean,
            "std": self.std,
        }


@dataclasses.dataclass(frozen=True)
class ServingTableRecord:
    """A table of rows.

    Attributes:
        name: full name in the model.
        rows: file of the table.
        initial: initial rows, which unknown ids get.
        default_row: the row of all unknown ids, which replaces ``initial``; or None.
        counts: file with the numbers of lookups of rows in training, or None.
    """

    name: str
    rows: TableFile
    initial: Initial
    default_row: Sequence[float] | None
    counts: ServingFileRecord | None = None


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
        shapes: shapes of the tables.
        feature_tables: index in the group of each output's table.
        dtype: dtype of the cores.
        cores: file of all cores, concatenated.
    """

    names: Sequence[str]
    shapes: Sequence[ShapeRecord]
    feature_tables: Sequence[int]
    dtype: str
    cores: ServingFileRecord


@dataclasses.dataclass(frozen=True)
class InputRecord:
    """One leaf of the model's arguments.

    Attributes:
        kind: ``"tensor"``, ``"ids"`` (a ``KeyedJaggedTensor`` in training) or ``"constant"``.
        keys: features of ids, in order.
        is_weighted: whether ids have weights.
        value: value of a constant.
    """

    kind: str
    keys: Sequence[str]
    is_weighted: bool
    value: Any


@dataclasses.dataclass(frozen=True)
class ServingManifest:
    """An exported model.

    Attributes:
        save: random id of the export.
        tables: tables of rows, in the order of their numbers in the program.
        tensor_train: groups of Tensor-Train tables, in the order of their numbers in the program.
        program: file that :func:`torch.export.save` wrote.
        tree: structure of positional and keyword arguments, serialised by PyTorch's pytree.
        inputs: leaves of the arguments.
        checkpoint: digest of the checkpoint of a chain with the same model, or None if unknown.
        package: the program as an AOTInductor package, or None.
        parameters: names of the forward's parameters that the positional arguments are for.
    """

    save: str
    tables: Sequence[ServingTableRecord]
    tensor_train: Sequence[TTGroupRecord]
    program: ServingFileRecord
    tree: str
    inputs: Sequence[InputRecord]
    checkpoint: str | None
    package: ServingFileRecord | None = None
    parameters: Sequence[str] = ()

    def write(self, folder: Path) -> None:
        """Writes the manifest and syncs it to the disk."""
        write_signed(folder / MANIFEST, _FORMAT, _VERSION, dataclasses.asdict(self), mode="x")

    @classmethod
    def read(cls, folder: Path) -> ServingManifest:
        """Reads the manifest of a model.

        Raises:
            ValueError: the manifest is missing, damaged, of another version, or has an invalid
                value.
        """
        path = folder / MANIFEST
        try:
            content = read_signed(path, _FORMAT, _VERSION, "an exported model")
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        return _MANIFEST.read(content, JsonPlace(str(path)))


def _crc32(path: Path) -> int:
    total = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            total = checksums.crc32(piece, total)
    return total


_COUNT = Integer(0, _MAX)
_SIZE = Integer(1, _MAX)
_FILE = Fields({"file": _NAME, "bytes": _COUNT, "crc32": CRC32}, ServingFileRecord)
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
        "counts": OrNull(_FILE),
    },
    ServingTableRecord,
    optional=("counts",),
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
        "parameters": Items(Text()),
    },
    ServingManifest,
    optional=("package", "parameters"),
)
