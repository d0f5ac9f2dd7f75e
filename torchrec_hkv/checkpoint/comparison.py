"""Compares two saved tables id by id, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.checkpoint.saved_checkpoint import OpenedTable
from torchrec_hkv.hash_table.files.entries_reader import count_owners, owner_ranges
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.progress import advance

_STEPS = ("last_steps", "scores")


@dataclasses.dataclass
class TableDifference:
    """How the second of two tables differs from the first.

    Attributes:
        before: number of ids in the first table.
        after: number of ids in the second table.
        came: number of ids that only the second table has.
        left: number of ids that only the first table has.
        changed: number of common ids whose rows differ in at least one bit.
        same: number of common ids with equal rows.
        states_changed: number of common ids whose optimizer states differ. None if states can't be
            compared: only one table has them, or they are spread over column shards.
        steps_changed: number of common ids whose last step or score differs.
        largest: largest difference of a value.
        norm: L2 norm of all differences of rows.
        norm_before: L2 norm of the rows of common ids in the first table.
        most: the ids whose rows changed most, each with the L2 norm of its change.
    """

    before: int = 0
    after: int = 0
    came: int = 0
    left: int = 0
    changed: int = 0
    same: int = 0
    states_changed: int | None = None
    steps_changed: int = 0
    largest: float = 0.0
    norm: float = 0.0
    norm_before: float = 0.0
    most: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether both tables hold the same ids, rows, states, scores and steps."""
        differences = (self.came, self.left, self.changed, self.states_changed, self.steps_changed)
        return not any(differences)

    def content(self) -> dict[str, Any]:
        """The attributes as JSON values."""
        content = dataclasses.asdict(self)
        content["relative_change"] = self.norm / self.norm_before if self.norm_before else 0.0
        content["equal"] = self.is_equal
        return content


def bytes_to_compare(first: OpenedTable, second: OpenedTable) -> int:
    """Bytes that :func:`compare` reads."""
    return sum(table.entries * table.entry_bytes() for table in (first, second))


def compare(
    first: OpenedTable, second: OpenedTable, batch_bytes: int, *, show: int = 5
) -> TableDifference:
    """Compares two tables.

    Args:
        first: a table that has files of its own.
        second: the table to compare with, which also has files of its own.
        batch_bytes: memory limit in bytes. One more byte is used per slot of a table that is
            saved in deltas.
        show: number of ids in :attr:`TableDifference.most`.

    Raises:
        ValueError: the tables have different numbers of columns, or a file can't be read.
    """
    if first.dim != second.dim:
        raise ValueError(
            f"Rows of table {first.name!r} have {first.dim} values in the first folder and "
            f"{second.dim} in the second: they can't be compared."
        )
    counts = torch.zeros(OWNERS, dtype=torch.int64)
    for part in (*first.first_columns, *second.first_columns):
        counts += count_owners(part, batch_bytes)
    size = max(first.entry_bytes(), second.entry_bytes())
    names = ["rows", *_STEPS]
    has_states = all(_whole_states(table) for table in (first, second))
    if has_states:
        names.append("states")
    result = TableDifference(states_changed=0 if has_states else None)
    squares = squares_before = 0.0
    for owners in owner_ranges(counts, batch_bytes // (6 * size)):
        old = first.collect(names, batch_bytes, owners)
        new = second.collect(names, batch_bytes, owners)
        at = torch.searchsorted(new["ids"], old["ids"])
        there = at < len(new["ids"])
        there[there.clone()] = new["ids"][at[there]] == old["ids"][there]
        both_old, both_new = there.nonzero().flatten(), at[there]
        result.before += len(old["ids"])
        result.after += len(new["ids"])
        result.left += len(old["ids"]) - len(both_old)
        result.came += len(new["ids"]) - len(both_old)
        rows = old["rows"][both_old], new["rows"][both_new]
        different = _differs(*rows)
        result.changed += int(different.sum())
        result.same += int((~different).sum())
        others = {
            name: _differs(old[name][both_old], new[name][both_new])
            for name in (*_STEPS, "states")
            if name in old and name in new
        }
        if result.states_changed is not None:
            result.states_changed += int(others.pop("states").sum())
        result.steps_changed += int(torch.stack(list(others.values())).any(0).sum())
        change = (rows[1].double() - rows[0].double()).nan_to_num()
        squares += float(change.square().sum())
        squares_before += float(rows[0].double().nan_to_num().square().sum())
        if change.numel():
            result.largest = max(result.largest, float(change.abs().max()))
        norms = change.square().sum(1).sqrt()
        best = norms.topk(min(show, len(norms)))
        ids = old["ids"][both_old][best.indices].tolist()
        found = [pair for pair in zip(ids, best.values.tolist(), strict=True) if pair[1] > 0]
        result.most = sorted([*result.most, *found], key=lambda pair: -pair[1])[:show]
        advance(len(old["ids"]) * first.entry_bytes() + len(new["ids"]) * second.entry_bytes())
    result.norm, result.norm_before = math.sqrt(squares), math.sqrt(squares_before)
    return result


def _whole_states(table: OpenedTable) -> bool:
    first = table.first_columns[0]
    return first.columns.end == table.dim and any(f.name == "states" for f in first.fields)


def _differs(old: Tensor, new: Tensor) -> Tensor:
    """Which entries differ. Values of one dtype are compared bit by bit, others by value."""
    if old.dtype == new.dtype and old.is_floating_point():
        bits = torch.int32 if old.dtype.itemsize == 4 else torch.int16
        old, new = (tensor.contiguous().view(bits) for tensor in (old, new))
    different = old != new
    return different if different.dim() == 1 else different.flatten(1).any(1)
