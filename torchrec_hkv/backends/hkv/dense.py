"""The dense-compatible mode of ``hkv``: the table holds rows 0 to N - 1, accessible by number.

The table is trained like any other hash table. In addition, tensors hold its rows and optimizer
states in the order of row numbers, as stock tables have them. They are refreshed when they are
read; values written into them are copied into the table before its next lookup.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_hkv.hash_table import Initializer, TableGroup, TableState, initial_rows
from torchrec_hkv.hash_table.files.state_columns import StateColumns

#: FBGEMM's name for the sums of squares of Adagrad and row-wise Adagrad.
_SUMS = "momentum1"
#: Number of updates of the table, int64 ``[1]``, which does not depend on the sharding.
STEP = "optimizer_step"


def dense_capacity(rows: int) -> int:
    """Number of slots in which each of ``rows`` rows finds a slot: 25 % more, and two buckets."""
    return rows + -(-rows // 4) + 128


class DenseRows:
    """The rows of one shard by row number.

    Args:
        group: the group of the table. All rows are inserted into it here.
        table: index of the table.
        feature: index of a feature of the table.
        rows: number of rows of the shard.
        first_row: number of the shard's first row. In the hash table, ids are row numbers within
            the shard.
        column_offset: first column of the shard.
        name: name of the table.
        seed: seed of the initial rows.
        initializer: initializer of the rows.
        num_features: number of features of the group.

    Raises:
        RuntimeError: a row found no slot.
    """

    def __init__(
        self,
        group: TableGroup,
        table: int,
        feature: int,
        *,
        rows: int,
        first_row: int,
        column_offset: int,
        name: str,
        seed: int,
        initializer: Initializer | None,
        num_features: int,
    ) -> None:
        self._group, self._table = group, table
        device = group.device
        numbers = torch.arange(rows, dtype=torch.int64, device=device)
        offsets = torch.zeros(num_features + 1, dtype=torch.int64, device=device)
        offsets[feature + 1 :] = rows
        group.find_or_insert(numbers, offsets, 1)
        state = group.export_table(table)
        slots = state.occupied.nonzero().flatten()
        if slots.numel() != rows:
            raise RuntimeError(
                f"table '{name}': {slots.numel()} of {rows} rows found a slot, but dense=True "
                "needs a slot for each row: report this with the number of rows."
            )
        # The slots of rows never change: nothing is evicted, and the table does not grow.
        self._slots = torch.empty_like(slots)
        self._slots[state.ids[slots]] = slots
        dim = state.rows.shape[1]
        first = initial_rows(
            numbers + first_row,
            dim,
            table=name,
            seed=seed,
            initializer=initializer,
            column_offset=column_offset,
        )
        state.rows[self._slots] = first.to(state.rows)
        group.load_table(table, state)
        self._parts = _parts(group, state)
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    def read(self, *, states: bool) -> dict[str, Tensor]:
        """The tensors with current values. Every call returns the same tensor objects.

        Args:
            states: True for the optimizer states, False for ``"weight"``.
        """
        self.flush()
        state = self._group.export_table(self._table)
        names = [name for name in self._parts if (name != "weight") == states]
        for name in names:
            value = self._parts[name](state)
            value = value if name == STEP else value[self._slots]
            if name not in self._tensors:
                self._tensors[name] = value.to(self._group.device, copy=True)
            elif name != STEP or not torch.equal(
                self._tensors[name], value.to(self._tensors[name])
            ):
                self._tensors[name].copy_(value)
            self._versions[name] = self._tensors[name]._version
        return {name: self._tensors[name] for name in names}

    def share_step(self, first: DenseRows) -> None:
        """Uses the tensor with the number of updates of another shard of the table on this rank.
        All shards make the same updates."""
        states = first.read(states=True)
        if STEP in states:
            self._tensors[STEP] = states[STEP]
            self._versions[STEP] = states[STEP]._version

    def flush(self) -> None:
        """Copies values that were written into the tensors since the last read into the table."""
        changed = {
            name: tensor
            for name, tensor in self._tensors.items()
            if tensor._version != self._versions[name]
        }
        if not changed:
            return
        state = self._group.export_table(self._table)
        for name, tensor in changed.items():
            part = self._parts[name](state)
            if name == STEP:
                part.copy_(tensor)
            else:
                part[self._slots] = tensor.to(part)
            self._versions[name] = tensor._version
        self._group.load_table(self._table, state)


def _parts(group: TableGroup, state: TableState) -> dict[str, Callable[[TableState], Tensor]]:
    """For each tensor name, a function that returns the tensor as a view of a table's state."""
    parts: dict[str, Callable[[TableState], Tensor]] = {"weight": lambda s: s.rows}
    kind = type(group.optimizer).__name__
    if kind == "RowWiseAdagrad":
        parts[_SUMS] = lambda s: s.states[:, 0]
    elif kind == "Adagrad":
        parts[_SUMS] = lambda s: s.states
    elif group.optimizer is not None and state.states.shape[1] > 0:
        dim, columns = state.rows.shape[1], StateColumns.of_layout(group.state_layout)
        for k in range(columns.of_columns):
            parts[f"optimizer_states_{k}"] = _columns(slice(k * dim, (k + 1) * dim))
        for k in range(columns.of_rows):
            parts[f"optimizer_row_states_{k}"] = _columns(columns.of_columns * dim + k)
        parts[STEP] = lambda s: s.optimizer_step
    return parts


def _columns(which: slice | int) -> Callable[[TableState], Tensor]:
    return lambda state: state.states[:, which]
