"""State tensors of hash tables in a ``state_dict``, with sizes that do not depend on the ranks.

A shard's tensors have one position for each slot, and some unused ones. The positions of all shards
add up to a number that depends only on ``num_embeddings``. ``torch.distributed.checkpoint`` can
therefore load them at any number of ranks. A rank then reads positions whose ids belong to other
ranks (``sharding/state/state_exchange.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.backends.hkv.counts import CountsLoad, counts_spec, export_counts
from torchrec_hkv.backends.optimizers import hash_table_optimizer
from torchrec_hkv.backends.protocol import OptimizerSpec, TableShard, TensorSpec
from torchrec_hkv.backends.save_types import COUNTS, EntriesLoad
from torchrec_hkv.hash_table import TableGroup, TableState
from torchrec_hkv.hash_table.admission import Admission
from torchrec_hkv.hash_table.eviction import EPOCH_POLICIES
from torchrec_hkv.hash_table.files.file_target import FileTarget
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.files.state_columns import StateColumns
from torchrec_hkv.hash_table.routing import owner_rank
from torchrec_hkv.hash_table.stored_rows import (
    int8_parts,
    number_dtype,
    numbers_of,
    stored_as,
    stored_with_scales,
)

_FORMAT = 1
# Lowest bit of the epoch in the first element of the head; the format is in the bits below it.
_EPOCH_BIT = 8
#: Name of the tensor about the whole table: format and epoch, state layout, updates, clock.
HEAD = "table_state"
_ROW_STATES = "optimizer_row_states"
# Scales of int8 rows. A load that has them restores the rows bit for bit.
_SCALES = "scales"
# Unused positions, for capacities that are rounded up on each rank.
_MORE_PLACES = 4096


def _state_name(k: int) -> str:
    return f"optimizer_states_{k}"


def state_columns(optimizer: OptimizerSpec | None) -> tuple[StateColumns, int]:
    """The columns of a row's optimizer states, and the number of their layout."""
    hash_optimizer = hash_table_optimizer(optimizer)
    layout = 0 if hash_optimizer is None else hash_optimizer.config().layout
    return StateColumns.of_layout(layout), layout


def _places(shard: TableShard) -> int:
    rows = shard.num_embeddings
    total = rows + rows // 32 + _MORE_PLACES

    def at(row: int) -> int:
        return row * total // rows

    return at(shard.row_offset + shard.capacity) - at(shard.row_offset)


def state_spec(
    shard: TableShard,
    optimizer: OptimizerSpec | None,
    slots: int,
    keeps_scores: bool,
    admission: Admission | None,
) -> dict[str, TensorSpec]:
    """The tensors of a shard. One-dimensional tensors are on the shards of the first column only;
    ``"table_state"`` is on the first shard only.

    Raises:
        ValueError: the table is spread over so many ranks that a shard has too few positions.
    """
    places = _places(shard)
    if places < slots:
        raise ValueError(
            f"table '{shard.name}': a shard has {slots} slots, but its tensors in a state_dict "
            f"have {places} rows: shard the table over fewer ranks."
        )
    spec = {"weight": TensorSpec((places, shard.dim), number_dtype(shard.dtype))}
    if shard.dtype == torch.int8:
        spec[_SCALES] = TensorSpec((places,), torch.float32)
    states, _ = state_columns(optimizer)
    for k in range(states.of_columns):
        spec[_state_name(k)] = TensorSpec((places, shard.dim), torch.float32)
    if states.of_rows:
        spec[_ROW_STATES] = TensorSpec((places, states.of_rows), torch.float32)
    if shard.column_offset == 0:
        spec["ids"] = TensorSpec((places,), torch.int64)
        spec["occupied"] = TensorSpec((places,), torch.bool)
        spec["last_steps"] = TensorSpec((places,), torch.int32)
        if keeps_scores:
            spec["scores"] = TensorSpec((places,), torch.int64)
        spec |= counts_spec(shard, admission)
        if shard.row_offset == 0:
            spec[HEAD] = TensorSpec((4,), torch.int64)
    return spec


def export_state(
    group: TableGroup, table: int, shard: TableShard, spec: Mapping[str, TensorSpec]
) -> dict[str, Tensor]:
    """A consistent copy of a table with the tensors of :func:`state_spec`."""
    with group.unchanged():
        return _export_state(group, table, shard, spec)


def _export_state(
    group: TableGroup, table: int, shard: TableShard, spec: Mapping[str, TensorSpec]
) -> dict[str, Tensor]:
    state = group.export_table(table)
    states = StateColumns.of_layout(group.state_layout)
    parts = {
        **split_rows(state.rows, shard.dim),
        "ids": state.ids,
        "occupied": state.occupied,
        "last_steps": state.last_steps,
        "scores": state.scores,
        _ROW_STATES: state.states[:, states.of_columns * shard.dim :][:, : states.of_rows],
    }
    for k in range(states.of_columns):
        parts[_state_name(k)] = state.states[:, k * shard.dim : (k + 1) * shard.dim]
    exported = {}
    for name, tensor_spec in spec.items():
        if name == HEAD:
            exported[name] = head_of(group, table)
            continue
        if name.startswith(COUNTS):
            exported[name] = export_counts(group, table, tensor_spec)
            continue
        part = parts[name]
        exported[name] = torch.zeros(tensor_spec.shape, dtype=tensor_spec.dtype, device=part.device)
        exported[name][: part.shape[0]] = part
    return exported


def head_of(group: TableGroup, table: int) -> Tensor:
    """The tensor ``"table_state"``: properties of the whole table."""
    first = _FORMAT | (group.epoch if _has_epochs(group, table) else 0) << _EPOCH_BIT
    step = int(group.optimizer_steps[table])
    return torch.tensor([first, group.state_layout, step, group.clock])


def _has_epochs(group: TableGroup, table: int) -> bool:
    return group.tables[table].eviction in EPOCH_POLICIES


def split_rows(stored: Tensor, dim: int) -> dict[str, Tensor]:
    """Stored rows by the names of a table's state: numbers, and the scales of int8 rows."""
    if stored.dtype != torch.int8:
        return {"weight": stored}
    return {"weight": numbers_of(stored, dim), _SCALES: int8_parts(stored, dim)[1]}


def split_states(states: Tensor, layout: int, dim: int) -> dict[str, Tensor]:
    """States of rows by the names of a table's state."""
    parts = StateColumns.of_layout(layout)
    split = {_state_name(k): states[:, k * dim : (k + 1) * dim] for k in range(parts.of_columns)}
    if parts.of_rows:
        split[_ROW_STATES] = states[:, parts.of_columns * dim :][:, : parts.of_rows]
    return split


def saved_clock(table_state: Tensor) -> int:
    """The clock in ``"table_state"``."""
    return int(table_state[3])


def saved_epoch(table_state: Tensor) -> int:
    """The epoch in ``"table_state"``."""
    return int(table_state[0]) >> _EPOCH_BIT


class StateLoad(EntriesLoad):
    """Fills a table from state tensors.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        shard: the part of the table on this rank.
        owners: range ``[first, end)`` of owner buckets whose ids the table holds.
    """

    def __init__(
        self, group: TableGroup, table: int, shard: TableShard, owners: tuple[int, int]
    ) -> None:
        self._group, self._table, self._shard, self._owners = group, table, shard, owners
        self._states = StateColumns.of_layout(group.state_layout)
        *_, self._width, self._scored, _, _ = _C.table_layout(group.handle, table)
        self._put_entries = self._lost = 0
        self._counts = CountsLoad(group, table, owners)

    def check(self, table_state: Tensor) -> None:
        _, layout, *_ = table_state.tolist()
        if layout != self._group.state_layout:
            raise ValueError(
                f"table '{self._shard.name}': the state to load has optimizer states of layout "
                f"{layout}, but those of {self._group.optimizer} have layout "
                f"{self._group.state_layout}: load it with the optimizer it was trained with."
            )

    def load_same(self, table_state: Tensor, tensors: Mapping[str, Tensor]) -> None:
        slots = self._group.full_slots(self._table)
        cut = {name: tensor[:slots] for name, tensor in tensors.items()}
        step = table_state[2:3].clone()
        state = TableState(
            occupied=cut["occupied"].contiguous(),
            ids=cut["ids"].contiguous(),
            rows=self._stored_rows(cut),
            states=self._joined(cut, slots),
            last_steps=cut["last_steps"].contiguous(),
            scores=cut["scores"].contiguous() if self._scored else torch.empty(0).long(),
            optimizer_step=step,
        )
        with self._group.alone():
            self._group.load_table(self._table, state)
            self._set_epoch(table_state)
            self._group.set_clock(max(self._group.clock, saved_clock(table_state)))
            if self._counts.name in tensors:
                self._counts.load_same(tensors[self._counts.name])

    def begin(self, table_state: Tensor) -> None:
        self._group.clear_table(self._table)
        self._set_epoch(table_state)
        self._group.set_clock(max(self._group.clock, saved_clock(table_state)))
        self._step = int(table_state[2])
        # The caller's batches are bounded, so the budget need not be.
        self._target = FileTarget(self._group, self._table, 1 << 20)

    def _set_epoch(self, table_state: Tensor) -> None:
        # Tables of other policies may be in the group. They have no epoch to load.
        if _has_epochs(self._group, self._table):
            self._group.set_epoch(saved_epoch(table_state))

    def put(self, entries: Mapping[str, Tensor]) -> None:
        owner = owner_rank(entries["ids"], OWNERS)
        owned = ((owner >= self._owners[0]) & (owner < self._owners[1])).nonzero().flatten()
        if owned.numel() == 0:
            return
        cut = {name: tensor[owned] for name, tensor in entries.items()}
        n = owned.numel()
        batch = {
            "ids": cut["ids"],
            "rows": self._stored_rows(cut),
            "last_steps": cut["last_steps"],
            "states": self._joined(cut, n),
        }
        if self._scored:
            batch["scores"] = cut["scores"]
        self._put_entries += n
        self._group.reserve(self._table, min(self._put_entries, self._target.capacity))
        self._lost += self._target.restore(batch, exact=False)

    def put_counts(self, name: str, first: int, part: Tensor) -> None:
        if name == self._counts.name:
            self._counts.put(first, part)

    def finish(self, *, allow_loss: bool = False) -> int:
        if self._lost and not allow_loss:
            self._group.clear_table(self._table)
            raise ValueError(
                f"table '{self._shard.name}': {self._lost} entries of the state to load found no "
                "slot: give the table a larger num_embeddings, or use torchrec_hkv.checkpoint.load "
                "with allow_loss=True."
            )
        self._group.optimizer_steps[self._table] = self._step
        self._group.fill_frames(self._table)
        self._counts.finish()
        return self._lost

    def _stored_rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        weight = tensors["weight"]
        if self._shard.dtype != torch.int8:
            return weight.contiguous()
        if _SCALES not in tensors:
            return stored_as(weight, torch.int8)
        return stored_with_scales(weight, tensors[_SCALES])

    def _joined(self, tensors: Mapping[str, Tensor], n: int) -> Tensor:
        dim = self._shard.dim
        device = tensors["weight"].device
        states = torch.zeros(n, self._width, device=device)
        for k in range(self._states.of_columns):
            states[:, k * dim : (k + 1) * dim] = tensors[_state_name(k)]
        if self._states.of_rows:
            at = self._states.of_columns * dim
            states[:, at : at + self._states.of_rows] = tensors[_ROW_STATES]
        return states
