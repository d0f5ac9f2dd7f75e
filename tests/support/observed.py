"""What a HashTable shows of its entries, as Python numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.hash_table import Entries, EvictionPolicy, HashTable

Row = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the real table shows of an id after a call."""

    row: Row
    score: int
    slot: int


def signed(score: int) -> int:
    """The int64 of the same bits as an unsigned number."""
    return score - 2**64 if score >= 2**63 else score


def score_of(given: int, policy: EvictionPolicy) -> int:
    """The score that a policy means by an int64 of a table's."""
    return given if policy == "customized" else given % 2**64


def as_rows(tensor: Tensor) -> list[Row]:
    """Rows as tuples of floats."""
    return [tuple(row) for row in tensor.float().cpu().tolist()]


def joined(parts: Any) -> Entries | None:
    """Batches of an export as one; None without any."""
    parts = list(parts)
    if not parts:
        return None
    fields = [(part.ids, part.rows, part.scores, part.states) for part in parts]
    return Entries(*(torch.cat(column) for column in zip(*fields, strict=True)))


def observe(table: HashTable) -> dict[int, Seen]:
    """All that a table shows of its entries."""
    entries = joined(table.export(batch_size=37))
    if entries is None:
        return {}
    ids = entries.ids.tolist()
    assert len(set(ids)) == len(ids), "an id was exported twice"
    slots = table.find_slots(entries.ids).tolist()
    scores = (score_of(score, table.eviction) for score in entries.scores.tolist())
    columns = zip(ids, as_rows(entries.rows), scores, slots, strict=True)
    return {id_: Seen(row, score, slot) for id_, row, score, slot in columns}
