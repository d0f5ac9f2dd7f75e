"""Loads the state of tables that are sharded by hash, after saving on other ranks.

``torch.distributed.checkpoint`` gives every rank a part of the positions of a saved table. If the
distribution over ranks equals the saved one, these entries belong to this rank. Otherwise every
entry is broadcast to all ranks, in batches, and each rank takes the entries that it owns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.backends.save_types import COUNTS, EntriesLoad, LoadCounts
from torchrec_hkv.collective import on_every_rank
from torchrec_hkv.sharding.state.sharded_state import LAYOUT_KEY, ShardedTableState

# Number of entries, or of bytes of admission counters, that are broadcast at a time.
_BATCH = 1 << 16
_BYTES = 1 << 24

#: A table, the number of its entries over all ranks, and how many found no slot on this rank.
Losses = list[tuple[ShardedTableState, LoadCounts]]
_losses: ContextVar[Losses | None] = ContextVar("losses", default=None)


@contextlib.contextmanager
def entries_may_be_lost() -> Iterator[Losses]:
    """A context in which ``load_state_dict`` leaves out entries that find no slot; elsewhere it
    raises. Yields a list to which each table whose entries are inserted again is added."""
    placed: Losses = []
    token = _losses.set(placed)
    try:
        yield placed
    finally:
        _losses.reset(token)


def exchange_state(
    state: ShardedTableState,
    local: Mapping[str, Mapping[str, Tensor]],
    loads: Mapping[str, EntriesLoad],
    device: torch.device,
    pg: dist.ProcessGroup,
) -> Tensor:
    """Loads one table. A collective call.

    Args:
        state: distribution of the table over the ranks.
        local: tensors of each shard on this rank, by shard key.
        loads: load of each of these shards, by shard key.
        device: device of the tables.
        pg: the ranks.

    Returns:
        The tensor ``"table_state"`` on the CPU.

    Raises:
        ValueError: the state does not match, or entries found no slot outside of
            :func:`entries_may_be_lost`. All ranks raise.
    """
    table = _StateExchange(state, local, device, pg)
    table_state = table.whole_table_tensor("table_state")
    layout = int(table.whole_table_tensor(LAYOUT_KEY))
    on_every_rank(lambda: [load.check(table_state) for load in loads.values()], pg)
    if layout == state.layout:
        table.load_same(loads, table_state)
    else:
        table.load_other(loads, table_state)
    return table_state


class _StateExchange:
    def __init__(
        self,
        state: ShardedTableState,
        local: Mapping[str, Mapping[str, Tensor]],
        device: torch.device,
        pg: dist.ProcessGroup,
    ) -> None:
        self._state, self._local, self._device, self._pg = state, local, device, pg
        self._rank = dist.get_rank()
        # Indices of shards, grouped by row offset and sorted by column offset.
        offsets = sorted({shard.row_offset for shard in state.shards})
        self._rows = [
            sorted(
                (i for i, shard in enumerate(state.shards) if shard.row_offset == offset),
                key=lambda i: state.shards[i].column_offset,
            )
            for offset in offsets
        ]

    def _broadcast(self, key: str, index: int, tensor: Tensor | None, shape: Any) -> Tensor:
        """Broadcasts a tensor of a shard from its rank."""
        if tensor is None:
            spec = self._state.specs[index][key]
            tensor = torch.empty(shape, dtype=spec.dtype, device=self._device)
        else:
            tensor = tensor.to(self._device).contiguous()
        if dist.get_world_size(self._pg) > 1:
            dist.broadcast(tensor, self._state.ranks[index], group=self._pg)
        return tensor

    def _local_tensor(self, key: str, index: int) -> Tensor | None:
        if self._state.ranks[index] != self._rank:
            return None
        return self._local[self._state.shards[index].key][key]

    def whole_table_tensor(self, key: str) -> Tensor:
        """A tensor of the first shard that describes the whole table."""
        index = self._rows[0][0]
        shape = self._state.specs[index][key].shape
        return self._broadcast(key, index, self._local_tensor(key, index), shape).cpu()

    def _keys_of_entries(self) -> list[str]:
        """Names of one-dimensional tensors, which shards of the first column have."""
        spec = self._state.specs[self._rows[0][0]]
        table_keys = ("table_state", LAYOUT_KEY)
        keys = [key for key in spec if len(spec[key].shape) == 1 and key not in table_keys]
        return [key for key in keys if not key.startswith(COUNTS)]

    def _keys_of_counts(self, index: int) -> list[str]:
        """Names of the tensors of admission counters of a shard of the first column."""
        return [key for key in self._state.specs[index] if key.startswith(COUNTS)]

    def load_same(self, loads: Mapping[str, EntriesLoad], table_state: Tensor) -> None:
        """Loads every entry into its slot. Broadcasts ids to the other column shards."""
        for indices in self._rows:
            of_entries: dict[str, Tensor] = {}
            if len(indices) > 1:
                for key in [*self._keys_of_entries(), *self._keys_of_counts(indices[0])]:
                    shape = self._state.specs[indices[0]][key].shape
                    local = self._local_tensor(key, indices[0])
                    of_entries[key] = self._broadcast(key, indices[0], local, shape)
            for index in indices:
                if self._state.ranks[index] == self._rank:
                    key = self._state.shards[index].key
                    loads[key].load_same(table_state, {**of_entries, **self._local[key]})

    def load_other(self, loads: Mapping[str, EntriesLoad], table_state: Tensor) -> None:
        """Broadcasts every entry to all ranks."""
        for load in loads.values():
            load.begin(table_state)
        entries = 0
        for indices in self._rows:
            places = self._state.specs[indices[0]]["ids"].shape[0]
            for first in range(0, places, _BATCH):
                entries += self._put_entries(indices, first, min(_BATCH, places - first), loads)
        for indices in self._rows:
            for key in self._keys_of_counts(indices[0]):
                self._put_counts(key, indices[0], loads)
        losses = _losses.get()
        allow = losses is not None
        of_ranks = on_every_rank(
            lambda: sum(load.finish(allow_loss=allow) for load in loads.values()), self._pg
        )
        if losses is not None:
            # Each column shard has all entries of its rows.
            placed = LoadCounts(entries * len(self._rows[0]), of_ranks[dist.get_rank(self._pg)])
            losses.append((self._state, placed))

    def _put_counts(self, key: str, index: int, loads: Mapping[str, EntriesLoad]) -> None:
        (size,) = self._state.specs[index][key].shape
        for first in range(0, size, _BYTES):
            n = min(_BYTES, size - first)
            local = self._local_tensor(key, index)
            local_part = None if local is None else local[first : first + n]
            part = self._broadcast(key, index, local_part, (n,))
            for load in loads.values():
                load.put_counts(key, first, part)

    def _put_entries(
        self, indices: list[int], first: int, n: int, loads: Mapping[str, EntriesLoad]
    ) -> int:
        """Broadcasts the entries of some places; returns how many there are."""
        occupied = self._local_tensor("occupied", indices[0])
        part = None if occupied is None else occupied[first : first + n]
        places = self._broadcast("occupied", indices[0], part, (n,)).nonzero().flatten()
        if places.numel() == 0:
            return 0

        def shown(key: str, index: int) -> Tensor:
            local_part = self._local_tensor(key, index)
            if local_part is not None:
                local_part = local_part[first : first + n].to(self._device)[places]
            shape = (places.numel(), *self._state.specs[index][key].shape[1:])
            return self._broadcast(key, index, local_part, shape)

        entries = {
            key: shown(key, indices[0]) for key in self._keys_of_entries() if key != "occupied"
        }
        # Concatenate column shards to whole rows.
        wide = [key for key in self._state.specs[indices[0]] if key not in entries]
        wide = [key for key in wide if len(self._state.specs[indices[0]][key].shape) == 2]
        whole = {key: torch.cat([shown(key, i) for i in indices], dim=1) for key in wide}
        columns = sorted(indices, key=lambda i: self._state.shards[i].column_offset)
        for key, load in loads.items():
            shard = next(s for s in self._state.shards if s.key == key)
            position = [self._state.shards[i].column_offset for i in columns]
            at = position.index(shard.column_offset)
            cut = dict(entries)
            for name, tensor in whole.items():
                widths = [self._state.specs[i][name].shape[1] for i in columns]
                begin = sum(widths[:at])
                cut[name] = tensor[:, begin : begin + widths[at]]
            load.put(cut)
        return places.numel()
