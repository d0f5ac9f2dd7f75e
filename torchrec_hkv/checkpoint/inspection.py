"""Counts what a saved table holds, in one pass over ids, steps and scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.checkpoint.saved_checkpoint import OpenedTable
from torchrec_hkv.hash_table.files.entries_reader import read_entries
from torchrec_hkv.hash_table.files.saved_part import SavedPart
from torchrec_hkv.hash_table.files.shard_files import entry_bytes
from torchrec_hkv.hash_table.routing import owner_rank
from torchrec_hkv.progress import advance

_U32 = (1 << 32) - 1
#: Policies whose scores count lookups, with a mask of the bits of the count.
_COUNTS = {"lfu": (1 << 63) - 1, "aged_lfu": (1 << 63) - 1, "epoch_lfu": _U32}


class Histogram:
    """Counts non-negative numbers in classes of doubling width: 0, 1, 2 to 3, 4 to 7 and so on."""

    def __init__(self) -> None:
        self._counts = torch.zeros(65, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Counts values: int64, not negative."""
        bits = torch.zeros_like(values)
        for shift in (32, 16, 8, 4, 2, 1):  # the position of the highest bit
            step = (values >> (bits + shift)) > 0
            bits += step * shift
        classes = torch.where(values > 0, bits + 1, torch.zeros_like(bits))
        self._counts += torch.bincount(classes, minlength=65)

    def rows(self) -> list[dict[str, int]]:
        """The classes that are not empty, each with ``from``, ``to`` and ``entries``."""
        return [
            {"from": (1 << c) >> 1, "to": ((1 << c) - 1), "entries": int(self._counts[c])}
            for c in self._counts.nonzero().flatten().tolist()
        ]


@dataclasses.dataclass(frozen=True)
class FoundEntry:
    """An entry of a table.

    Attributes:
        shard: index of the first column's shard that holds the entry.
        slot: slot of the entry in this shard.
        last_step: step of the last training lookup.
        age: number of the table's steps since then.
        score: score of the policy; None under LRU.
        row: values of all columns.
        states: optimizer states in the first column's shard.
    """

    shard: int
    slot: int
    last_step: int
    age: int
    score: int | None
    row: list[float]
    states: list[float]


def bytes_to_inspect(table: OpenedTable) -> int:
    """Number of bytes that :func:`inspect_table` reads."""
    return sum(
        shard.entries * _part_bytes_to_inspect(part)
        for part in table.first_columns
        for _, manifest in part.layers
        for shard in manifest.shards
    )


def _part_bytes_to_inspect(part: SavedPart) -> int:
    names = ("ids", "slots", "last_steps", "scores")
    return entry_bytes([field for field in part.fields if field.name in names])


def inspect_table(table: OpenedTable, batch_bytes: int) -> dict[str, Any]:
    """Counts what a table holds.

    Args:
        table: a table that has files of its own.
        batch_bytes: memory limit in bytes. One more byte is used per slot of a table that is
            saved in deltas.

    Returns:
        JSON values by name: ``ids``, ``slots``, ``fill``, ``steps`` (the clock), ``ages`` and more.
        If scores are counts, also ``counts``. ``ages`` and ``counts`` are as
        :meth:`Histogram.rows`.
    """
    ages, counts = Histogram(), Histogram()
    first = table.first_columns
    manifest = first[0].manifest
    bits = _COUNTS.get(manifest.table["eviction"])
    fills = []
    for part in first:
        ids = 0
        for batch in read_entries(part, ("last_steps", "scores"), batch_bytes):
            ids += len(batch["ids"])
            ages.add(_ages(part, batch["last_steps"]))
            if bits is not None and "scores" in batch:
                counts.add(batch["scores"] & bits)
            advance(len(batch["ids"]) * _part_bytes_to_inspect(part))
        slots = part.manifest.buckets * part.manifest.bucket_slots
        fills.append({"ids": ids, "slots": slots, "fill": ids / slots})
    described = {
        "name": table.name,
        "backend": table.backend,
        "ids": sum(fill["ids"] for fill in fills),
        "slots": sum(fill["slots"] for fill in fills),
        "fill": sum(fill["ids"] for fill in fills) / sum(fill["slots"] for fill in fills),
        "capacity": sum(part.manifest.capacity for part in first),
        "dim": table.dim,
        "dtype": manifest.table["dtype"],
        "eviction": manifest.table["eviction"],
        "seed": manifest.table["seed"],
        "state_values": sum(
            part.manifest.table["state_dim"] for part in table.parts or () if part in _row(table)
        ),
        "steps": max(part.manifest.clock for part in first),
        "updates": max(part.manifest.optimizer_step for part in first),
        "epoch": max(part.manifest.epoch for part in first),
        "bytes": table.bytes,
        "deltas": len(first[0].earlier),
        "counts_unadmitted": any(part.manifest.counts is not None for part in first),
        "shards": [
            {**fill, "owners": list(part.owners)} for fill, part in zip(fills, first, strict=True)
        ],
        "column_shards": len(table.parts or ()) // len(first),
        "ages": ages.rows(),
    }
    if bits is not None:
        described["counts"] = counts.rows()
    return described


def _row(table: OpenedTable) -> list[SavedPart]:
    """The shards that make up one row."""
    owners = min(part.owners for part in table.parts or ())
    return [part for part in table.parts or () if part.owners == owners]


def _ages(part: SavedPart, last_steps: Tensor) -> Tensor:
    return (part.manifest.clock - (last_steps.long() & _U32)) & _U32


def find(table: OpenedTable, id_: int, batch_bytes: int) -> FoundEntry | None:
    """Finds the entry of an id; None if the table does not have the id.

    Args:
        table: a table that has files of its own.
        id_: the id, an int64.
        batch_bytes: as for :func:`inspect_table`.
    """
    owner = int(owner_rank(torch.tensor([id_]), 1 << 16))
    for index, part in enumerate(table.first_columns):
        if not part.owners[0] <= owner < part.owners[1]:
            continue
        names = ("last_steps", "scores", "states")
        for batch in read_entries(part, names, batch_bytes, (owner, owner + 1)):
            for at in (batch["ids"] == id_).nonzero().flatten().tolist():
                ranges = table.collect(["rows"], batch_bytes, (owner, owner + 1))
                row = ranges["rows"][int(torch.searchsorted(ranges["ids"], id_))]
                scores, states = batch.get("scores"), batch.get("states")
                return FoundEntry(
                    shard=index,
                    slot=int(batch["slots"][at]),
                    last_step=int(batch["last_steps"][at]) & _U32,
                    age=int(_ages(part, batch["last_steps"][at])),
                    score=None if scores is None else int(scores[at]),
                    row=row.float().tolist(),
                    states=[] if states is None else states[at].tolist(),
                )
    return None
