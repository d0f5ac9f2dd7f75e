"""Exports and imports rows of tables by id, over all ranks and for all kinds of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardedTensor, ShardingType

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import TableShard
from torchrec_hkv.backends.row_numbers import check_row_numbers, put_row_numbers
from torchrec_hkv.checkpoint.agreement import agreed
from torchrec_hkv.collective import on_every_rank, this_rank
from torchrec_hkv.sharding.modules.collection import ShardedTable, skip_file_tables
from torchrec_hkv.sharding.state.names import joined, named_modules, named_tables
from torchrec_hkv.sharding.state.replicated_state import ReplicatedState
from torchrec_hkv.table_names import find_name

#: Default number of rows in a batch.
BATCH = 1 << 16


def export_rows(
    model: nn.Module, table: str, *, batch: int = BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields all ids and rows of a table, the same on every rank; a collective call.

    Works for hash tables, Tensor-Train tables and stock tables under any sharding. Every rank must
    iterate to the end. If a column shard lacks an id, its columns have the initial row. In a
    ``DMPCollection`` each group of ranks gets the rows of its replica, and stock tables are
    refused.

    Args:
        model: a sharded model.
        table: full name of the table, which is its key in the ``state_dict`` without ``.weight``,
            or its own name if no other table has it.
        batch: maximal number of ids to yield at a time.

    Yields:
        Ids, int64 ``[n]``, and rows, float32 ``[n, embedding_dim]``, in host memory.

    Raises:
        ValueError: there is no such table, several have that name, ranks name different tables, or
            the table can't be read by id.
    """
    part = _agreed(model, table, batch=batch)
    device = _wire_device()
    for shards in part.rows:
        first = shards[0]
        id_batches = part.ids(first, batch) if first.is_local else iter(())
        while True:
            batch_ids = next(id_batches, None) if first.is_local else None
            ids = _broadcast_vector(batch_ids, first.rank, device, part.group)
            if ids is None:
                break
            columns = [
                _broadcast(
                    part.rows_of(shard, ids) if shard.is_local else None,
                    (ids.numel(), shard.columns),
                    shard.rank,
                    device,
                    part.group,
                )
                for shard in shards
            ]
            yield ids, torch.cat(columns, dim=1)


def export_scores(
    model: nn.Module, table: str, *, batch: int = BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields all ids and scores of a hash table that keeps scores, as :func:`export_rows` does.

    Yields:
        Ids, int64 ``[n]``, and scores, int64 ``[n]``, in host memory.
    """
    part = _agreed(model, table, batch=batch)
    device = _wire_device()
    for first, *_ in part.rows:
        id_batches = part.ids(first, batch) if first.is_local else iter(())
        while True:
            batch_ids = next(id_batches, None) if first.is_local else None
            ids = _broadcast_vector(batch_ids, first.rank, device, part.group)
            if ids is None:
                break
            scores = part.scores_of(first, ids) if first.is_local else None
            yield ids, _broadcast_vector(scores, first.rank, device, part.group)


def import_rows(
    model: nn.Module,
    table: str,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    allow_loss: bool = False,
) -> int:
    """Sets rows of a table by id; a collective call.

    Ids that a hash table lacks are inserted as if they had been looked up once. Optimizer states of
    the rows are reset to zero. A Tensor-Train table needs all of its rows; they are approximated by
    cores of its ranks (TT-SVD). The batches of a dense table ``weight`` are
    ``[(torch.arange(len(weight)), weight)]``.

    Args:
        model: a sharded model.
        table: as for :func:`export_rows`.
        batches: ids, int64 ``[n]``, and rows, ``[n, embedding_dim]``. Every rank passes all of
            them.
        allow_loss: whether ids of the lowest scores may be left out if a hash table has no slot for
            them.

    Returns:
        Number of ids that found no slot; each column shard counts.

    Raises:
        ValueError: there is no such table, several have that name, or the ranks were given
            different arguments; nothing has changed then. Also if ids or rows don't fit the table,
            or ids found no slot; batches before that have been written then.
    """
    part = _agreed(model, table, allow_loss=allow_loss)

    def run() -> int:
        # A rank may hold several shards, but an iterator can be read only once.
        here = [shard for shards in part.rows for shard in shards if shard.is_local]
        checked = _checked(batches, part, table)
        if not here:
            return sum(0 for _ in checked)  # iterating may be a collective call
        stored = list(checked) if len(here) > 1 else checked
        return sum(part.put_rows(shard, stored) for shard in here)

    lost = sum(on_every_rank(run))
    if lost and not allow_loss:
        raise ValueError(
            f"table {table!r}: {lost} ids found no place: give it a larger num_embeddings, or pass "
            "allow_loss=True."
        )
    return lost


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A shard of a table: its rank, its number of columns, and what identifies it in its table.

    The rank is None if every rank holds the table, which is data-parallel.
    """

    rank: int | None
    columns: int
    place: TableShard | int

    @property
    def is_local(self) -> bool:
        return self.rank is None or self.rank == this_rank()


@dataclasses.dataclass(frozen=True)
class _TableRows:
    """A table: its shards, by rows and then by columns, and functions for those of this rank."""

    rows: Sequence[Sequence[_Shard]]
    num_rows: int | None  # None unless ids are row numbers
    ids: Callable[[_Shard, int], Iterator[Tensor]]
    rows_of: Callable[[_Shard, Tensor], Tensor]
    put_rows: Callable[[_Shard, Iterable[tuple[Tensor, Tensor]]], int]
    scores_of: Callable[[_Shard, Tensor], Tensor] | None = None  # of hash tables
    group: dist.ProcessGroup | None = None  # the ranks that hold the shards; None: all


def _agreed(model: nn.Module, table: str, batch: int = BATCH, **same: bool) -> _TableRows:
    """The table of a call. All ranks must pass the same table and arguments."""
    found: list[_TableRows] = []

    def arguments() -> dict[str, Any]:
        if batch < 1:
            raise ValueError(f"batch is {batch}, but must be at least 1.")
        name, part = _find(model, table)
        found.append(part)
        return {"table": name, **same}

    agreed(arguments)
    return found[0]


def _find(model: nn.Module, table: str) -> tuple[str, _TableRows]:
    backend_tables = named_tables(model)
    with skip_file_tables():
        state = model.state_dict()
    copied = set(_data_parallel_stock(model))
    stock = {
        key.removesuffix(".weight"): value
        for key, value in state.items()
        if key.endswith(".weight")
        and (isinstance(value, ShardedTensor) or key.removesuffix(".weight") in copied)
        and key.removesuffix(".weight") not in backend_tables
    }
    replicated = {
        key.removesuffix(".weight")
        for key, value in state.items()
        if key.endswith(".weight") and isinstance(value, DTensor)
    }
    name = find_name(table, [*backend_tables, *stock, *replicated])
    if name in replicated:
        raise ValueError(
            f"Table {name!r} is a stock table of a DMPCollection, whose rows can't be read by id: "
            "save it with torchrec_hkv.checkpoint.save and load it into a "
            "DistributedModelParallel, or read them from the state_dict."
        )
    if name in backend_tables:
        return name, _of_backend(backend_tables[name])
    return name, (_of_copies if name in copied else _of_stock)(stock[name])


def _data_parallel_stock(model: nn.Module) -> Iterator[str]:
    """Full names of the stock tables of which each rank has a copy."""
    for path, module in named_modules(model):
        if not isinstance(module, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
            continue
        is_bags = isinstance(module, ShardedEmbeddingBagCollection)
        prefix = joined(path, "embedding_bags" if is_bags else "embeddings")
        for name, sharding in module.module_sharding_plan.items():
            if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                yield joined(prefix, name)


def _by_rows(shards: Iterable[tuple[int, int, _Shard]]) -> list[list[_Shard]]:
    """Groups shards by their row offsets, and orders each group by column offsets."""
    rows: dict[int, list[_Shard]] = {}
    for row, _, shard in sorted(shards, key=lambda item: item[:2]):
        rows.setdefault(row, []).append(shard)
    return list(rows.values())


def _of_backend(found: ShardedTable) -> _TableRows:
    lookups, state = found.collection.group_lookups(), found.state
    shards = zip(state.shards, state.ranks, strict=True)
    is_copied = isinstance(state, ReplicatedState)
    routes_by_hash = registry.get(found.planned.backend).routes_by_hash(state.shards[0].options)
    return _TableRows(
        _by_rows(
            (
                shard.row_offset,
                shard.column_offset,
                _Shard(None if is_copied else rank, shard.dim, shard),
            )
            for shard, rank in shards
        ),
        None if routes_by_hash else state.shards[0].num_embeddings,
        lambda shard, batch: lookups[shard.place.key].ids(shard.place.key, batch),
        lambda shard, ids: lookups[shard.place.key].rows_of(shard.place.key, ids),
        lambda shard, batches: lookups[shard.place.key].put_rows(
            shard.place.key, batches, state.owners(shard.place)
        ),
        lambda shard, ids: lookups[shard.place.key].entries_of(shard.place.key, ids)["scores"],
        found.collection.sharding_group,
    )


def _of_stock(weight: ShardedTensor) -> _TableRows:
    metadata = weight.metadata().shards_metadata
    local = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in weight.local_shards()}

    def tensor_of(shard: _Shard) -> tuple[Tensor, list[int]]:
        offsets = metadata[shard.place].shard_offsets
        return local[tuple(offsets)].detach(), offsets

    shards = _by_rows(
        (*shard.shard_offsets, _Shard(shard.placement.rank(), shard.shard_sizes[1], index))
        for index, shard in enumerate(metadata)
        if 0 not in shard.shard_sizes
    )
    return _of_tensors(shards, weight.size()[0], tensor_of)


def _of_copies(weight: Tensor) -> _TableRows:
    rows, columns = weight.shape
    return _of_tensors([[_Shard(None, columns, 0)]], rows, lambda _: (weight.detach(), [0, 0]))


def _of_tensors(
    shards: Sequence[Sequence[_Shard]],
    num_rows: int,
    tensor_of: Callable[[_Shard], tuple[Tensor, Sequence[int]]],
) -> _TableRows:
    """The part of a stock table, whose shards are tensors at a row and a column offset."""

    def ids(shard: _Shard, batch: int) -> Iterator[Tensor]:
        tensor, offsets = tensor_of(shard)
        return iter(torch.arange(offsets[0], offsets[0] + tensor.shape[0]).split(batch))

    def rows_of(shard: _Shard, numbers: Tensor) -> Tensor:
        tensor, offsets = tensor_of(shard)
        return tensor[(numbers - offsets[0]).to(tensor.device)].float().cpu()

    def put_rows(shard: _Shard, batches: Iterable[tuple[Tensor, Tensor]]) -> int:
        tensor, offsets = tensor_of(shard)
        put_row_numbers(tensor, batches, *offsets)
        return 0

    return _TableRows(shards, num_rows, ids, rows_of, put_rows)


def _checked(
    batches: Iterable[tuple[Tensor, Tensor]], part: _TableRows, table: str
) -> Iterator[tuple[Tensor, Tensor]]:
    dim = sum(shard.columns for shard in part.rows[0])
    for ids, rows in batches:
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(
                f"table {table!r}: ids have dtype {ids.dtype} and shape {tuple(ids.shape)}, but "
                "must be int64 of one dimension."
            )
        if not rows.is_floating_point() or tuple(rows.shape) != (ids.numel(), dim):
            raise ValueError(
                f"table {table!r}: rows have dtype {rows.dtype} and shape {tuple(rows.shape)}, but "
                f"must be floats of shape {(ids.numel(), dim)}."
            )
        if part.num_rows is not None:
            check_row_numbers(table, ids, part.num_rows)
        yield ids.cpu(), rows.detach().cpu()


def _wire_device() -> torch.device:
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _broadcast(
    tensor: Tensor | None,
    shape: tuple[int, ...],
    rank: int | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    if rank is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return tensor
    sent = torch.empty(shape, device=device) if tensor is None else tensor.to(device).contiguous()
    dist.broadcast(sent, rank, group=group)
    return sent.cpu()


def _broadcast_vector(
    ids: Tensor | None, rank: int | None, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor | None:
    """Broadcasts ids, or their scores, from the rank that holds them. Returns None if it has no
    more."""
    if rank is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return ids
    count = torch.tensor([-1 if ids is None else ids.numel()], device=device)
    dist.broadcast(count, rank, group=group)
    if int(count) < 0:
        return None
    sent = torch.empty(int(count), dtype=torch.int64) if ids is None else ids
    sent = sent.to(device).contiguous()
    dist.broadcast(sent, rank, group=group)
    return sent.cpu()
