"""The dense-compatible mode of ``hkv``: rows 0 to N - 1 are all there, and lie open by number.

Such a table trains as every other of its kind. What is kept besides are tensors of its rows and
optimizer states in the order of row numbers, as stock tables give theirs: they are brought up to
date when they are asked for, and what was written into them is put into the table before its next
lookup.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_hkv.hash_table import Initializer, TableGroup, TableState, initial_rows

#: FBGEMM's name of the sums of squares of Adagrad and of row-wise Adagrad.
_SUMS = "momentum1"


def dense_capacity(rows: int) -> int:
    """Slots for so many rows that must all find a place: a quarter more, and two buckets."""
    return rows + -(-rows // 4) + 128


class DenseRows:
    """The rows of one shard by their number.

    Args:
        group: holds the table; every row is put into it here.
        table: its index.
        feature: the index of a feature of its.
        rows: number of rows of the shard.
        first_row: of the shard; tables know rows by their number in the shard.
        column_offset: first column of the shard.
        name: the table's.
        seed: of initial rows.
        initializer: of initial rows.
        num_features: of the group.

    Raises:
        RuntimeError: not all rows found a place.
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
                f"table '{name}': {slots.numel()} of {rows} rows found a place, but dense=True "
                "needs a place for all: report it with the number of rows."
            )
        # Rows stay where they are: nothing is evicted, and the table does not grow.
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
        """The tensors, up to date: always the same objects.

        Args:
            states: whether those of the optimizer are wanted, or ``"weight"`` alone.
        """
        self.flush()
        state = self._group.export_table(self._table)
        wanted = [name for name in self._parts if (name != "weight") == states]
        for name in wanted:
            value = self._parts[name](state)
            value = value if name == "optimizer_step" else value[self._slots]
            if name not in self._tensors:
                self._tensors[name] = value.to(self._group.device, copy=True)
            else:
                self._tensors[name].copy_(value)
            self._versions[name] = self._tensors[name]._version
        return {name: self._tensors[name] for name in wanted}

    def flush(self) -> None:
        """Puts into the table what was written into the tensors since they were read."""
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
            if name == "optimizer_step":
                part.copy_(tensor)
            else:
                part[self._slots] = tensor.to(part)
            self._versions[name] = tensor._version
        self._group.load_table(self._table, state)


def _parts(group: TableGroup, state: TableState) -> dict[str, Callable[[TableState], Tensor]]:
    """The tensors by name, each as a view of a table's state."""
    parts: dict[str, Callable[[TableState], Tensor]] = {"weight": lambda s: s.rows}
    kind = type(group.optimizer).__name__
    if kind == "RowWiseAdagrad":
        parts[_SUMS] = lambda s: s.states[:, 0]
    elif kind == "Adagrad":
        parts[_SUMS] = lambda s: s.states
    elif group.optimizer is not None and state.states.shape[1] > 0:
        parts["optimizer_states"] = lambda s: s.states
        parts["optimizer_step"] = lambda s: s.optimizer_step
    return parts
