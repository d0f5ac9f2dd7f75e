"""Moves the contents of tables between ranks, batch by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from torchrec_hkv.backends.protocol import GroupLookup, TableShard
from torchrec_hkv.backends.save_types import COUNTS, EntriesLoad
from torchrec_hkv.collective import on_every_rank
from torchrec_hkv.progress import advance
from torchrec_hkv.sharding.modules.collection import BackendCollection, ShardedTable
from torchrec_hkv.sharding.state.replicated_state import ReplicatedState

#: Number of entries, or of bytes of counts, that are sent at a time.
BATCH = 1 << 16
_COUNT_BYTES = 1 << 24
#: Optimizer states that a row has once, not for each column.
_ROW_STATES = "optimizer_row_states"
_HEAD = "table_state"


@dataclasses.dataclass(frozen=True)
class RankTransfer:
    """Sends tensors between ranks.

    Attributes:
        pg: the process group of the ranks.
        rank: this rank.
        device: device of tensors while they are sent.
    """

    pg: dist.ProcessGroup
    rank: int
    device: torch.device

    @classmethod
    def of(cls, collection: BackendCollection) -> RankTransfer:
        """Creates it for the ranks of a collection."""
        pg = collection._env.process_group
        device = collection._device or torch.device("cpu")
        return cls(pg, dist.get_rank(pg), device)

    def send(self, tensors: dict[str, Tensor] | None, holder: int) -> dict[str, Tensor] | None:
        """Sends the tensors of rank ``holder`` to all ranks. Returns them on every rank, or None if
        the holder has none."""
        header: list[Any] = [None]
        if self.rank == holder and tensors is not None:
            header = [[(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]]
        if dist.get_world_size(self.pg) == 1:
            return tensors
        dist.broadcast_object_list(header, group=self.pg, group_src=holder)
        if header[0] is None:
            return None
        sent = {}
        for name, dtype, shape in header[0]:
            if self.rank == holder:
                tensor = tensors[name].detach().to(self.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(tensor, group=self.pg, group_src=holder)
            sent[name] = tensor
        return sent


def put_entries(load: EntriesLoad, shard: TableShard, entries: Mapping[str, Tensor]) -> None:
    """Puts entries with whole rows into a shard, which takes its own ids and columns."""
    columns = slice(shard.column_offset, shard.column_offset + shard.dim)
    load.put(
        {
            name: tensor[:, columns] if tensor.dim() == 2 and name != _ROW_STATES else tensor
            for name, tensor in entries.items()
        }
    )


def _shards_on_rank(table: ShardedTable, rank: int) -> list[TableShard]:
    pairs = zip(table.state.shards, table.state.ranks, strict=True)
    return [shard for shard, holder in pairs if holder == rank]


def move_entries(
    old: ShardedTable,
    new: ShardedTable,
    wire: RankTransfer,
    heads: dict[GroupLookup, dict[str, Tensor]],
    *,
    allow_loss: bool,
) -> int:
    """Fills a table that is routed by hash with the entries of another one; a collective call.

    Args:
        old: the table to read.
        new: an empty table under another plan.
        wire: sends tensors between the ranks.
        heads: gets the ``table_state`` of the table, by the lookups and keys of this rank's shards.
        allow_loss: whether entries may find no slot.

    Returns:
        Number of entries that found no slot, over all ranks.

    Raises:
        ValueError: entries found no slot. All ranks raise the same error.
    """
    rows = _by_rows(old)
    old_lookups, new_lookups = old.collection.group_lookups(), new.collection.group_lookups()
    rank_shards = _shards_on_rank(new, wire.rank)
    loads = {
        s.key: new_lookups[s.key].open_entries(s.key, new.state.owners(s)) for s in rank_shards
    }
    first = rows[0][0]
    rest = (
        old_lookups[first[0].key].without_entries(first[0].key) if first[1] == wire.rank else None
    )
    head = wire.send(None if rest is None else {_HEAD: rest[_HEAD]}, first[1])[_HEAD].cpu()
    for shard in rank_shards:
        heads.setdefault(new_lookups[shard.key], {})[shard.key] = head
        loads[shard.key].begin(head)
    for shards in rows:
        for entries in _entries(shards, old_lookups, wire):
            for shard in rank_shards:
                put_entries(loads[shard.key], shard, entries)
    for shards in rows:
        _move_counts(*shards[0], old_lookups, loads, wire)

    def finish() -> int:
        return sum(load.finish(allow_loss=allow_loss) for load in loads.values())

    return sum(on_every_rank(finish, wire.pg))


def _by_rows(table: ShardedTable) -> list[list[tuple[TableShard, int]]]:
    """Shards with their ranks, grouped by row offsets and ordered by column offsets."""
    rows: dict[int, list[tuple[TableShard, int]]] = {}
    pairs = zip(table.state.shards, table.state.ranks, strict=True)
    for shard, rank in sorted(pairs, key=lambda p: (p[0].row_offset, p[0].column_offset)):
        rows.setdefault(shard.row_offset, []).append((shard, rank))
    return list(rows.values())


def _entries(
    shards: list[tuple[TableShard, int]], lookups: Mapping[str, GroupLookup], wire: RankTransfer
) -> Iterator[dict[str, Tensor]]:
    """Entries with whole rows, the same on every rank."""
    first, holder = shards[0]
    batches = lookups[first.key].entries(first.key, BATCH) if holder == wire.rank else iter(())
    while True:
        entries = wire.send(next(batches, None) if holder == wire.rank else None, holder)
        if entries is None:
            return
        parts = [entries]
        for shard, rank in shards[1:]:
            beside = None
            if rank == wire.rank:
                beside = lookups[shard.key].entries_of(shard.key, entries["ids"].cpu())
                beside = {name: t for name, t in beside.items() if t.dim() == 2}
            parts.append(wire.send(beside, rank))
        yield _joined(parts, [shard.dim for shard, _ in shards])
        advance(sum(t.numel() * t.element_size() for part in parts for t in part.values()))


def _joined(parts: list[dict[str, Tensor]], widths: list[int]) -> dict[str, Tensor]:
    """Joins column shards. States that a row has once are averaged over columns, as in
    checkpoints."""
    joined = dict(parts[0])
    for name, tensor in parts[0].items():
        if tensor.dim() == 2 and name != _ROW_STATES:
            joined[name] = torch.cat([part[name] for part in parts], dim=1)
        elif name == _ROW_STATES:
            value, filled = tensor.clone(), widths[0]
            for part, width in zip(parts[1:], widths[1:], strict=True):
                filled += width
                value += (part[name] - value) * (width / filled)
            joined[name] = value
    return joined


def _move_counts(
    shard: TableShard,
    holder: int,
    lookups: Mapping[str, GroupLookup],
    loads: Mapping[str, EntriesLoad],
    wire: RankTransfer,
) -> None:
    """Sends the counts of ids that are not admitted to all ranks."""
    counts: dict[str, Tensor] = {}
    if holder == wire.rank:
        rest = lookups[shard.key].without_entries(shard.key)
        counts = {name: tensor for name, tensor in rest.items() if name.startswith(COUNTS)}
    names: list[Any] = [[(name, len(tensor)) for name, tensor in counts.items()]]
    if dist.get_world_size(wire.pg) > 1:
        dist.broadcast_object_list(names, group=wire.pg, group_src=holder)
    for name, size in names[0]:
        for first in range(0, size, _COUNT_BYTES):
            part = {name: counts[name][first : first + _COUNT_BYTES]} if counts else None
            sent = wire.send(part, holder)[name]
            for load in loads.values():
                load.put_counts(name, first, sent)


def move_state(old: ShardedTable, new: ShardedTable, wire: RankTransfer) -> None:
    """Copies the states of a table's shards to equal shards of another table; a collective call."""
    old_lookups, new_lookups = old.collection.group_lookups(), new.collection.group_lookups()
    everywhere = isinstance(new.state, ReplicatedState)
    targets = {
        (shard.row_offset, shard.column_offset): (shard, rank)
        for shard, rank in zip(new.state.shards, new.state.ranks, strict=True)
    }
    for shard, rank in zip(old.state.shards, old.state.ranks, strict=True):
        # Every rank has a whole replicated table.
        holder = 0 if isinstance(old.state, ReplicatedState) else rank
        exported = old_lookups[shard.key].export_table(shard.key) if holder == wire.rank else None
        state = wire.send(exported, holder)
        target, to = targets[shard.row_offset, shard.column_offset]
        if everywhere or to == wire.rank:
            new_lookups[target.key].load_table(target.key, {k: t.cpu() for k, t in state.items()})


def move_tensors(old: Mapping[str, Any], new: Mapping[str, Any], wire: RankTransfer) -> None:
    """Copies sharded tensors into tensors of the same sizes, in place; a collective call.

    States with one value a row change their size with the number of column shards. They are
    averaged over column shards, and each new column shard gets the average.

    Args:
        old: tensors to read, by name; each rank passes those that it has.
        new: tensors to fill, by name; each rank passes those that it has.
        wire: sends tensors between the ranks.
    """
    described = on_every_rank(
        lambda: (
            {n: _parts(t, wire) for n, t in old.items()},
            {n: t.size() for n, t in new.items()},
        ),
        wire.pg,
    )
    parts: dict[str, list[_Place]] = {}
    for old_parts, _ in described:
        for name, places in old_parts.items():
            tensor_parts = parts.setdefault(name, [])
            tensor_parts += [place for place in places if place not in tensor_parts]
    sizes = {name: size for _, old_sizes in described for name, size in old_sizes.items()}
    for name in sorted(parts):
        if name in sizes:
            _move_tensor(old.get(name), new.get(name), sorted(parts[name]), sizes[name], wire)


#: Offsets, sizes and the rank of a part of a tensor.
_Place = tuple[tuple[int, ...], tuple[int, ...], int]


def _parts(tensor: Tensor, wire: RankTransfer) -> list[_Place]:
    if not isinstance(tensor, ShardedTensor):
        return [((0,) * tensor.dim(), tuple(tensor.shape), wire.rank)]
    return [
        (tuple(part.shard_offsets), tuple(part.shard_sizes), part.placement.rank())
        for part in tensor.metadata().shards_metadata
        if 0 not in part.shard_sizes
    ]


def _local(tensor: Tensor | None) -> list[tuple[tuple[int, ...], Tensor]]:
    """Parts of a tensor on this rank, each with its offsets."""
    if tensor is None:
        return []
    if not isinstance(tensor, ShardedTensor):
        return [((0,) * tensor.dim(), tensor)]
    return [(tuple(s.metadata.shard_offsets), s.tensor) for s in tensor.local_shards()]


def _move_tensor(
    old: Tensor | None,
    new: Tensor | None,
    parts: list[_Place],
    size: torch.Size,
    wire: RankTransfer,
) -> None:
    sources, targets = dict(_local(old)), _local(new)
    ends = [max(o[d] + s[d] for o, s, _ in parts) for d in range(len(size))]
    if tuple(ends) != tuple(size):
        _move_row_values(sources, targets, parts, ends[0], size[0], wire)
        return
    sent: set[tuple[int, ...]] = set()
    for offsets, _, holder in parts:
        if offsets in sent:  # replicated
            continue
        sent.add(offsets)
        payload = {"part": sources[offsets]} if holder == wire.rank else None
        part = wire.send(payload, holder)["part"]
        for to, target in targets:
            _copy_common(offsets, part, to, target)


def _copy_common(
    offsets: tuple[int, ...], part: Tensor, to: tuple[int, ...], target: Tensor
) -> None:
    """Copies the intersection of two parts of a tensor."""
    begin = [max(a, b) for a, b in zip(offsets, to, strict=True)]
    end = [
        min(a + m, b + n) for a, m, b, n in zip(offsets, part.shape, to, target.shape, strict=True)
    ]
    if any(b >= e for b, e in zip(begin, end, strict=True)):
        return
    ranges = list(zip(begin, end, strict=True))
    source = tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, offsets, strict=True))
    into = tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, to, strict=True))
    target.detach()[into].copy_(part[source])


def _move_row_values(
    sources: dict[tuple[int, ...], Tensor],
    targets: list[tuple[tuple[int, ...], Tensor]],
    parts: list[_Place],
    before: int,
    after: int,
    wire: RankTransfer,
) -> None:
    """Moves states with one value a row, which are stacked over column shards, to another number of
    column shards."""
    values = torch.zeros(before, device=wire.device)
    for offsets, sizes, holder in parts:
        payload = {"part": sources[offsets]} if holder == wire.rank else None
        values[offsets[0] : offsets[0] + sizes[0]] = wire.send(payload, holder)["part"]
    rows = _common_rows(before, after)
    stacked = values.view(-1, rows).mean(0).repeat(after // rows)
    for (to,), target in targets:
        target.detach().copy_(stacked[to : to + len(target)])


def _common_rows(before: int, after: int) -> int:
    """Number of rows of a table whose values are stacked over column shards. Before or after there
    is a single column shard."""
    rows = min(before, after)
    if before % rows or after % rows:
        raise ValueError(
            f"{before} values, one for each row and column shard, can't become {after}: move the "
            "table to a plan without column shards first."
        )
    return rows
