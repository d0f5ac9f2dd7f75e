"""Reads dumps of NVIDIA's dynamicemb.

A dump has a folder for each collection, with files of keys, values, scores and optimizer states of
each rank, named ``TABLE_emb_keys.rank_0.world_size_2`` and so on. Keys and scores are int64, values
and states float32, without a header. ``TABLE_opt_args.json`` names the optimizer and the eviction
strategy.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from torchrec_hkv.backends.specs import OptimizerSpec
from torchrec_hkv.checkpoint.conversion.source import (
    Eviction,
    SourceTable,
    split_states,
    states_of,
)

_FILE = re.compile(
    r"(?P<table>.+)_emb_(?P<item>keys|values|scores|opt_values)"
    r"\.rank_(?P<rank>\d+)\.world_size_(?P<size>\d+)"
)
_KEYS, _VALUES, _SCORES, _STATES = "keys", "values", "scores", "opt_values"
_OPTIMIZERS = {
    "sgd": "sgd",
    "adam": "adam",
    "exact_adagrad": "adagrad",
    "adagrad": "adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
    "rowwise_adagrad": "rowwise_adagrad",
}
#: The last step of a table whose scores are ages. Ages become steps from 1 to this one.
_AGES = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Dump:
    """The files of a table.

    Attributes:
        folder: the folder of the files.
        table: the table's own name.
        ranks: files of each rank, by their kind.
    """

    folder: Path
    table: str
    ranks: list[dict[str, Path]]


def find_dumps(path: Path) -> list[_Dump]:
    """Finds the tables whose files are in a folder or in its subfolders.

    Raises:
        ValueError: files of a rank are missing, or a table was dumped from several numbers of
            ranks.
    """
    found: dict[tuple[Path, str], dict[tuple[int, int], dict[str, Path]]] = {}
    for file in sorted(path.rglob("*_emb_*.rank_*.world_size_*")):
        match = _FILE.fullmatch(file.name)
        if match is not None:
            ranks = found.setdefault((file.parent, match["table"]), {})
            at = (int(match["size"]), int(match["rank"]))
            ranks.setdefault(at, {})[match["item"]] = file
    dumps = []
    for (folder, table), ranks in found.items():
        sizes = {size for size, _ in ranks}
        if len(sizes) > 1:
            raise ValueError(
                f"{folder} has dumps of table {table!r} from {sorted(sizes)} ranks: keep one."
            )
        size = sizes.pop()
        missing = [
            f"{table}_emb_{item}.rank_{rank}.world_size_{size}"
            for rank in range(size)
            for item in (_KEYS, _VALUES)
            if item not in ranks.get((size, rank), {})
        ]
        if missing:
            raise ValueError(f"{folder} lacks {missing[0]}, a file of the dump of table {table!r}.")
        dumps.append(_Dump(folder, table, [ranks[size, rank] for rank in range(size)]))
    return dumps


def dump_tables(
    path: Path,
    attribute: str,
    optimizer: str | None,
    eviction: Eviction | None,
    without: Sequence[str],
) -> list[SourceTable]:
    """The tables of a dump.

    Args:
        path: the folder of the dump.
        attribute: ``"embedding_bags"`` or ``"embeddings"``; part of the tables' full names.
        optimizer: name of the optimizer whose states the dump has; None: the one that it names.
        eviction: what scores are; None: as the dump says.
        without: ``"states"`` leaves out optimizer states, ``"scores"`` scores and last steps.

    Raises:
        ValueError: files contradict each other.
    """
    return [
        _DumpedTable(dump, _name(path, dump, attribute), optimizer, eviction, without).source()
        for dump in find_dumps(path)
    ]


def _name(path: Path, dump: _Dump, attribute: str) -> str:
    """Full name of a dumped table. The folder of a dump is named after the collection's path, which
    begins with ``model``."""
    parts = dump.folder.relative_to(path).parts or (path.name,)
    module = ".".join(parts)
    if module == "model" or module.startswith("model."):
        module = module.removeprefix("model").removeprefix(".")
    elif dump.folder == path:
        module = ""
    return ".".join(filter(None, (module, attribute, dump.table)))


class _DumpedTable:
    def __init__(
        self,
        dump: _Dump,
        name: str,
        optimizer: str | None,
        eviction: Eviction | None,
        without: Sequence[str],
    ) -> None:
        self._dump, self.name = dump, name
        self._arguments = self._read_arguments()
        self._counts = [_size(files[_KEYS]) // 8 for files in dump.ranks]
        self.dim = self._dim()
        self._has_states = "states" not in without and self._all_have(_STATES)
        self._has_scores = "scores" not in without and self._all_have(_SCORES)
        self._optimizer = self._find_optimizer(optimizer)
        self._eviction = self._find_eviction(eviction)
        # Under LRU the scores of a dump are ages, of unknown unit.
        self._has_ages = self._eviction == "lru" and self._strategy in ("", "KLru")
        self._check_sizes()

    def _read_arguments(self) -> dict[str, Any]:
        file = self._dump.folder / f"{self._dump.table}_opt_args.json"
        if not file.is_file():
            return {}
        try:
            content = json.loads(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{file} is {type(content).__name__}, but must be an object.")
        return content

    def _all_have(self, item: str) -> bool:
        having = [item in files for files in self._dump.ranks]
        if any(having) and not all(having):
            raise ValueError(
                f"{self._dump.folder} has {item} of table {self._dump.table!r} of only some "
                "ranks: it must have it of all ranks, or of none."
            )
        # A table without states or scores has empty files.
        sizes = [_size(files[item]) for files in self._dump.ranks if item in files]
        return all(having) and sum(sizes) > 0

    def _dim(self) -> int:
        keys, values = sum(self._counts), sum(_size(f[_VALUES]) for f in self._dump.ranks)
        if keys == 0:
            raise ValueError(f"Table {self.name!r} of {self._dump.folder} has no keys.")
        if values % (4 * keys) or values == 0:
            raise ValueError(
                f"{self._dump.folder} has {values} bytes of values for {keys} keys of table "
                f"{self._dump.table!r}, which is not a whole number of rows of float32."
            )
        return values // (4 * keys)

    @property
    def _strategy(self) -> str:
        return str(self._arguments.get("evict_strategy", "")).rpartition(".")[2]

    def _find_optimizer(self, optimizer: str | None) -> OptimizerSpec | None:
        saved = _OPTIMIZERS.get(str(self._arguments.get("opt_type", "")).lower())
        if optimizer is None and saved is None and self._has_states:
            raise ValueError(
                f"The dump of table {self._dump.table!r} does not say whose optimizer's states it "
                "has: name it by --optimizer, or leave them out by --without states."
            )
        name = optimizer or saved
        return None if name is None else OptimizerSpec(name)

    def _find_eviction(self, eviction: Eviction | None) -> Eviction:
        if eviction is not None:
            return eviction
        if not self._has_scores or self._strategy in ("", "KLru"):
            return "lru"
        if self._strategy == "KLfu":
            return "lfu"
        if self._strategy == "KCustomized":
            return "customized"
        raise ValueError(
            f"The dump of table {self._dump.table!r} has scores of strategy {self._strategy!r}: "
            "say by --eviction what they are (lru: steps, lfu: counts, customized), or leave them "
            "out by --without scores."
        )

    def _check_sizes(self) -> None:
        widths = {_VALUES: 4 * self.dim}
        if self._has_scores:
            widths[_SCORES] = 8
        if self._has_states:
            parts = states_of(self._optimizer)
            widths[_STATES] = 4 * (parts.of_columns * self.dim + parts.of_rows)
        for count, files in zip(self._counts, self._dump.ranks, strict=True):
            if _size(files[_KEYS]) % 8:
                raise ValueError(f"{files[_KEYS]} has a part of a key at its end: it is cut short.")
            for item, width in widths.items():
                size = _size(files[item])
                if size != count * width:
                    raise ValueError(
                        f"{files[item]} has {size} bytes, but {count} keys need {count * width} "
                        f"({width} each)."
                    )

    def source(self) -> SourceTable:
        """The table as a conversion reads it."""
        self._oldest = self._scores_limit(max) if self._has_scores else 0
        clock = _AGES if self._has_ages and self._has_scores else 0
        if self._eviction == "lru" and self._has_scores and not self._has_ages:
            clock = self._oldest
            if not (self._scores_limit(min) >= 0 and clock < 1 << 32):
                raise ValueError(
                    f"Scores of table {self.name!r} are not steps from 0 to 2^32 - 1: name another "
                    "--eviction, or leave them out by --without scores."
                )
        return SourceTable(
            self.name,
            self.dim,
            torch.float32,
            sum(self._counts),
            self._read,
            self._optimizer,
            self._eviction,
            clock,
            int(self._arguments.get("iters", 0)),
        )

    def _scores_limit(self, limit: Any) -> int:
        found = []
        for count, files in zip(self._counts, self._dump.ranks, strict=True):
            for first in range(0, count, 1 << 20):
                part = _values(files[_SCORES], numpy.int64, first, min(1 << 20, count - first), 1)
                found.append(int(part.max() if limit is max else part.min()))
        return limit(found, default=0)

    def _read(self, batch_bytes: int) -> Iterator[dict[str, Tensor]]:
        start = float(self._arguments.get("initial_accumulator_value", 0.0) or 0.0)
        parts = states_of(self._optimizer)
        width = parts.of_columns * self.dim + parts.of_rows
        size = max(1, batch_bytes // (3 * (16 + 4 * (self.dim + width))))
        for count, files in zip(self._counts, self._dump.ranks, strict=True):
            for first in range(0, count, size):
                n = min(size, count - first)
                batch = {
                    "ids": _values(files[_KEYS], numpy.int64, first, n, 1).view(-1),
                    "weight": _values(files[_VALUES], numpy.float32, first, n, self.dim),
                }
                if self._has_states and width:
                    states = _values(files[_STATES], numpy.float32, first, n, width)
                    if self._optimizer.name in ("adagrad", "rowwise_adagrad"):
                        # dynamicemb's sums begin at the initial value, those of hash tables at 0.
                        states -= start
                    batch |= split_states(states, self._optimizer, self.dim)
                if self._has_scores:
                    batch |= self._scores(
                        _values(files[_SCORES], numpy.int64, first, n, 1).view(-1)
                    )
                yield batch

    def _scores(self, scores: Tensor) -> dict[str, Tensor]:
        if self._eviction != "lru":
            return {"scores": scores}
        if not self._has_ages:
            return {"last_steps": scores}
        share = scores.clamp(min=0).double() / max(1, self._oldest)
        return {"last_steps": (_AGES - (share * (_AGES - 1)).long()).clamp(1, _AGES)}


def _size(path: Path) -> int:
    return path.stat().st_size


def _values(path: Path, dtype: Any, first: int, n: int, width: int) -> Tensor:
    kind = numpy.dtype(dtype).newbyteorder("<")
    values = numpy.fromfile(path, kind, n * width, offset=first * width * kind.itemsize)
    if values.size != n * width:
        raise ValueError(f"{path} is cut short.")
    return torch.from_numpy(values.astype(dtype, copy=False)).view(n, width)
