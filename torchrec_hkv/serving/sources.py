"""Sources of the rows, cores and dense tensors of an export: a trained model, or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_hkv.backends.hkv.table import initializer_of
from torchrec_hkv.backends.tt.table import options_of as tt_options_of
from torchrec_hkv.backends.tt.table import shape_of
from torchrec_hkv.checkpoint.chain import NEWEST, digest_of
from torchrec_hkv.checkpoint.record import LINK, RECORD
from torchrec_hkv.checkpoint.rows import export_rows, export_scores
from torchrec_hkv.hash_table.eviction import counts_in, name_of, sums_scores
from torchrec_hkv.hash_table.initial_rows import table_seed
from torchrec_hkv.hash_table.initializers import initializer_from_fields, op_arguments
from torchrec_hkv.serving.checkpoints import Checkpoint
from torchrec_hkv.serving.model_tables import ModelTable, has_bags, is_weighted
from torchrec_hkv.serving.table_builder import Order
from torchrec_hkv.sharding.state.replicated_state import ReplicatedState
from torchrec_hkv.tensor_train import TTShape
from torchrec_hkv.tensor_train.dense import dense_blocks

_PIECE = 1 << 16
_TYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}

#: A seed, and the arguments that ``op_arguments`` returns for an initializer.
Start = tuple[int, dict[str, Any]]
#: Zeros, for unknown ids of tables without initial rows.
ZEROS: Start = (0, op_arguments(None))


class Source(Protocol):
    """Provides a model's tables and tensors to an export."""

    #: Digest of the checkpoint of a chain with the same contents, or None if unknown.
    digest: str | None

    def backend(self, table: ModelTable) -> str | None:
        """Name of the backend of a table in training, or None for stock tables."""

    def dtype(self, table: ModelTable) -> torch.dtype:
        """Dtype of a table's rows in training."""

    def has_cache(self, table: ModelTable) -> bool:
        """Whether a Tensor-Train table has a cache of rows."""

    def start(self, table: ModelTable) -> Start:
        """Initial rows of a table."""

    def batches(self, table: ModelTable) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields ids and float32 rows of a table, the same on every rank."""

    def counts(self, table: ModelTable) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields ids of a table and the number of lookups of each in training, int64, the same on
        every rank; nothing if the numbers are unknown."""

    def order(self, table: ModelTable) -> Order:
        """The order of the batches."""

    def shape(self, table: ModelTable) -> TTShape:
        """Shape of a Tensor-Train table."""

    def cores(self, table: ModelTable) -> list[Tensor]:
        """Cores of a Tensor-Train table, in host memory, on every rank."""

    def dense(self, name: str, tensor: Tensor, is_saved: bool) -> Tensor:
        """Returns a parameter or buffer in host memory.

        Args:
            name: key in the model's ``state_dict``.
            tensor: the module's tensor.
            is_saved: whether it is in the ``state_dict``.
        """


class TrainedModel:
    """A trained model in this process, sharded or not."""

    def __init__(self, model: nn.Module, digest: str | None) -> None:
        self._model, self.digest = model, digest

    def backend(self, table: ModelTable) -> str | None:
        return None if table.found is None else table.found.planned.backend

    def dtype(self, table: ModelTable) -> torch.dtype:
        if table.found is not None:
            return table.found.planned.shards[0].dtype
        return _TYPES.get(table.config.data_type.name, torch.float32)

    def has_cache(self, table: ModelTable) -> bool:
        return tt_options_of(table.found.planned.shards[0]).cache is not None

    def start(self, table: ModelTable) -> Start:
        if self.backend(table) != "hkv":
            return ZEROS
        shard = table.found.planned.shards[0]
        return table_seed(shard.options.seed, shard.name), op_arguments(initializer_of(shard))

    def batches(self, table: ModelTable) -> Iterator[tuple[Tensor, Tensor]]:
        if table.found is None:
            attribute = "embedding_bags" if has_bags(table.collection) else "embeddings"
            module = getattr(table.collection, attribute)[table.config.name]
            weight = getattr(module, "weight", None)
            if table.sharding_type in (None, "data_parallel") and isinstance(weight, Tensor):
                yield from _by_number(weight)
                return
        yield from export_rows(self._model, table.name)

    def counts(self, table: ModelTable) -> Iterator[tuple[Tensor, Tensor]]:
        if self.backend(table) != "hkv":
            return
        eviction = table.found.planned.shards[0].options.table_eviction
        if sums_scores(eviction):
            for ids, scores in export_scores(self._model, table.name):
                yield ids, counts_in(scores, name_of(eviction))

    def order(self, table: ModelTable) -> Order:
        return ()

    def shape(self, table: ModelTable) -> TTShape:
        return shape_of(table.found.planned.shards[0])

    def cores(self, table: ModelTable) -> list[Tensor]:
        shard, holder = table.found.planned.shards[0], table.found.state.ranks[0]
        is_copied = isinstance(table.found.state, ReplicatedState)
        is_alone = is_copied or not dist.is_initialized() or dist.get_world_size() == 1
        found_cores = None
        if is_alone or dist.get_rank() == holder:
            found_cores = table.found.collection.group_lookups()[shard.key].cores(shard.key)
            found_cores = [core.detach().cpu() for core in found_cores]
        if is_alone:
            return found_cores
        sent: list[Any] = [found_cores]
        dist.broadcast_object_list(sent, src=holder, group=table.found.collection.sharding_group)
        return sent[0]

    def dense(self, name: str, tensor: Tensor, is_saved: bool) -> Tensor:
        return _on_host(name, tensor)


class SavedModel:
    """A checkpoint of a model, with the unsharded module.

    Args:
        folder: folder that :func:`torchrec_hkv.checkpoint.save` wrote, or of a base of a chain.
        tables: tables of the module.

    Raises:
        ValueError: the checkpoint is damaged, is a delta or a chain, or lacks a table, or a table
            has means of weighted bags.
    """

    def __init__(self, folder: str | os.PathLike[str], tables: Sequence[ModelTable]) -> None:
        self._folder = path = Path(folder)
        if (path / NEWEST).is_file() and not (path / RECORD).is_file():
            raise ValueError(
                f"checkpoint is {path}, a chain of deltas: name its newest base, and follow the "
                "chain where the model serves, or merge it by checkpoint.compact."
            )
        self._checkpoint = Checkpoint(path)
        self.digest = digest_of(path) if (path / LINK).is_file() else None
        if self._checkpoint.is_delta:
            raise ValueError(
                f"checkpoint is {path}, a delta, which lacks most rows: name a base of its chain."
            )
        for table in tables:
            self._check(table)

    def _check(self, table: ModelTable) -> None:
        if table.is_sharded:
            raise ValueError(
                f"table {table.name!r} is sharded: with checkpoint=, give the module before "
                "sharding, or load the checkpoint and leave checkpoint= out."
            )
        if table.is_mean and is_weighted(table.collection):
            raise ValueError(
                f"table {table.name!r} has means of weighted bags, which sharding by rows divides "
                "by the sum of weights and other sharding by the number of ids, but a checkpoint "
                "doesn't name the sharding: load it into the sharded model, and export that."
            )
        dim = self._dim(table)
        if dim != table.dim:
            raise ValueError(
                f"table {table.name!r} has {dim} columns in {self._folder}, but {table.dim} in the "
                "module: the checkpoint is of another model."
            )

    def _dim(self, table: ModelTable) -> int:
        name = table.name
        if self._checkpoint.has_files(name):
            return self._checkpoint.width(name)
        if self._checkpoint.has_tensor(f"{name}.tt_shape"):
            return self.shape(table).embedding_dim
        return self._checkpoint.entry(f"{name}.weight").size[-1]

    def backend(self, table: ModelTable) -> str | None:
        record = self._checkpoint.record.tables.get(table.name)
        return None if record is None else record.backend

    def dtype(self, table: ModelTable) -> torch.dtype:
        name = table.name
        if self._checkpoint.has_files(name):
            return getattr(torch, self._checkpoint.manifest(name).table["dtype"])
        if self._checkpoint.has_tensor(f"{name}.tt_shape"):
            return self._checkpoint.entry(f"{name}.tt_core_0").properties.dtype
        return self._checkpoint.entry(f"{name}.weight").properties.dtype

    def has_cache(self, table: ModelTable) -> bool:
        return self._checkpoint.has_tensor(f"{table.name}.tt_cache_ids")

    def start(self, table: ModelTable) -> Start:
        if not self._checkpoint.has_files(table.name):
            return ZEROS
        fields = self._checkpoint.manifest(table.name).table
        initializer_fields = fields["initializer"]
        initializer = (
            None if initializer_fields is None else initializer_from_fields(initializer_fields)
        )
        return table_seed(fields["seed"], fields["name"]), op_arguments(initializer)

    def batches(self, table: ModelTable) -> Iterator[tuple[Tensor, Tensor]]:
        name = table.name
        if self._checkpoint.has_files(name):
            yield from self._checkpoint.entries(name)
        elif self._checkpoint.has_tensor(f"{name}.tt_shape"):
            if self.has_cache(table):
                raise ValueError(
                    "has a cache, and its cores lack the rows in it: load the checkpoint into the "
                    "sharded model, and export that."
                )
            for first, rows in dense_blocks(self.shape(table), self.cores(table)):
                yield torch.arange(first, first + rows.shape[0]), rows
        else:
            yield from _by_number(self._tensor(f"{name}.weight"))

    def counts(self, table: ModelTable) -> Iterator[tuple[Tensor, Tensor]]:
        if self._checkpoint.has_files(table.name):
            yield from self._checkpoint.counts(table.name)

    def order(self, table: ModelTable) -> Order:
        has_files = self._checkpoint.has_files(table.name)
        return self._checkpoint.order(table.name) if has_files else ()

    def shape(self, table: ModelTable) -> TTShape:
        return TTShape.unpacked(self._tensor(f"{table.name}.tt_shape").tolist()[1:])

    def cores(self, table: ModelTable) -> list[Tensor]:
        names = [f"{table.name}.tt_core_{k}" for k in range(self.shape(table).num_cores)]
        found = self._checkpoint.tensors(names)
        return [found[name] for name in names]

    def dense(self, name: str, tensor: Tensor, is_saved: bool) -> Tensor:
        if not is_saved:
            return _on_host(name, tensor)
        found = self._tensor(name)
        if found.shape != tensor.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(found.shape)} in {self._folder}, but "
                f"{tuple(tensor.shape)} in the module: the checkpoint is of another model."
            )
        return found.to(tensor.dtype)

    def _tensor(self, name: str) -> Tensor:
        return self._checkpoint.tensors([name])[name]


def _by_number(weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for ids in torch.arange(weight.shape[0]).split(_PIECE):
        yield ids, weight.detach()[ids.to(weight.device)].float().cpu()


def _on_host(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values: load or set it.")
    return tensor.detach().cpu()
