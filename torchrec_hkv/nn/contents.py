"""The contents of a table in host memory, to save it or to move it to another table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table import TableGroup

_ops = torch.ops.torchrec_hkv
_BATCH = 1 << 18


@dataclasses.dataclass(frozen=True)
class Contents:
    """Entries of one table in slot order.

    Attributes:
        ids: int64 ``[n]``.
        rows: float32 ``[n, dim]``.
        last_steps: int32 ``[n]``, the step of each id's last lookup.
        scores: int64 ``[n]``; ``[0]`` under LRU.
        states: float32 ``[n, state width]``.
    """

    ids: Tensor
    rows: Tensor
    last_steps: Tensor
    scores: Tensor
    states: Tensor

    def split(self, size: int) -> Iterator[Contents]:
        """Splits the entries into parts of at most ``size``."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        for first in range(0, len(self.ids), size):
            yield Contents(*(t[first : first + size] if len(t) else t for t in fields))

    def with_states(self, ids: Tensor, states: Tensor) -> Contents:
        """The same entries with new optimizer states; zeros for ids that are not in ``ids``.

        Args:
            ids: int64 ``[m]``, unique.
            states: float32 ``[m, width]``.
        """
        found, at = positions(ids, self.ids)
        selected_states = states.new_zeros(len(self.ids), states.shape[1])
        selected_states[found] = states[at[found]]
        return dataclasses.replace(self, states=selected_states)


def positions(ids: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Finds ids in a list of ids.

    Args:
        ids: int64 ``[m]``, unique.
        queries: int64 ``[n]``, the ids to find.

    Returns:
        Whether each wanted id was found, bool ``[n]``, and its position, int64 ``[n]``; positions
        of ids that were not found are undefined.
    """
    if ids.numel() == 0:
        return torch.zeros_like(queries, dtype=torch.bool), torch.zeros_like(queries)
    ordered, order = ids.sort()
    at = torch.searchsorted(ordered, queries).clamp(max=len(ids) - 1)
    return ordered[at] == queries, order[at]


def take(group: TableGroup, table: int) -> Contents:
    """A consistent copy of a table's contents. Synchronizes with the device."""
    with group.unchanged():
        slots = group.select_slots(table)
        parts = [
            [tensor.cpu() for tensor in _ops.read_slots(group.handle, table, part)]
            for part in (slots.split(_BATCH) if slots.numel() else (slots,))
        ]
    return Contents(*(torch.cat(column) for column in zip(*parts, strict=True)))


def put(group: TableGroup, table: int, contents: Contents) -> None:
    """Inserts entries into a table that holds none of their ids.

    The group's clock must not be before the entries' last steps.

    Raises:
        ValueError: an entry found no slot. The table is empty afterwards.
    """
    width = _C.table_layout(group.handle, table)[2]
    try:
        group.reserve(table, min(len(contents.ids), group.full_slots(table)))
        lost = sum(_put_part(group, table, part, width) for part in contents.split(_BATCH))
        if lost:
            raise ValueError(
                f"{lost} of {len(contents.ids)} rows found no slot in table "
                f"{group.tables[table].name!r} of {group.full_slots(table)} slots: give it a "
                "larger max_capacity."
            )
    except BaseException:
        group.clear_table(table)
        raise
    group.fill_frames(table)


def _put_part(group: TableGroup, table: int, part: Contents, width: int) -> int:
    """Inserts entries; returns how many found no slot."""
    states = part.states
    if states.shape[1] != width:
        states = torch.zeros(len(part.ids), width)
    fields = (part.ids, part.rows, part.last_steps, part.scores, states)
    entries = tuple(tensor.to(group.device).contiguous() for tensor in fields)
    lost = 0
    group.note_restore()
    while entries[0].numel():
        *displaced, counts = _ops.restore_entries(
            group.counter_tensor, group.handle, table, *entries
        )
        again, refused = counts.tolist()
        lost += refused
        # A displaced entry may still find a slot in its other bucket.
        entries = tuple(tensor[:again] for tensor in displaced)
    return lost
