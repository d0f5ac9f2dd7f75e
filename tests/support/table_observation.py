"""The observable contents of a HashTable as Python numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.hash_table import Entries, EvictionPolicy, HashTable

Row = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ObservedEntry:
    """The real table's entry of an id after a call."""

    row: Row
    score: int
    slot: int


def signed(score: int) -> int:
    """Returns the int64 with the bits of an unsigned number."""
    return score - 2**64 if score >= 2**63 else score


def score_of(given: int, policy: EvictionPolicy) -> int:
    """Converts an int64 of a table to the score of its policy."""
    return given if policy == "customized" else given % 2**64


def as_rows(tensor: Tensor) -> list[Row]:
    """Returns rows as tuples of floats."""
    return [tuple(row) for row in tensor.float().cpu().tolist()]


def joined(parts: Any) -> Entries | None:
    """Concatenates the batches of an export; None if there are none."""
    parts = list(parts)
    if not parts:
        return None
    fields = [(part.ids, part.rows, part.scores, part.states) for part in parts]
    return Entries(*(torch.cat(column) for column in zip(*fields, strict=True)))


def observe(table: HashTable) -> dict[int, ObservedEntry]:
    """Returns all observable entries of a table."""
    entries = joined(table.export(batch_size=37))
    if entries is None:
        return {}
    ids = entries.ids.tolist()
    assert len(set(ids)) == len(ids), "an id was exported twice"
    slots = table.find_slots(entries.ids).tolist()
    scores = (score_of(score, table.eviction) for score in entries.scores.tolist())
    columns = zip(ids, as_rows(entries.rows), scores, slots, strict=True)
    return {id_: ObservedEntry(row, score, slot) for id_, row, score, slot in columns}
