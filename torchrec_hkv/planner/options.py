"""Sharding options for tables on backends, and helpers for the parts of the planner."""

from __future__ import annotations

import copy
import weakref
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Self, TypeGuard, TypeVar

from torch import nn
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import BackendOptions, TableShard
from torchrec_hkv.planner.constraints import Candidate
from torchrec_hkv.sharding.state.names import joined
from torchrec_hkv.sharding.tables import (
    SUMMED_OVER_RANKS,
    balanced_rows,
    collection_of,
    config_shards,
    table_configs,
)

#: For each collection: the configs of its tables by name.
_CONFIGS: weakref.WeakKeyDictionary[nn.Module, dict[str, BaseEmbeddingConfig]] = (
    weakref.WeakKeyDictionary()
)


class CopiedOption(ShardingOption):
    """A sharding option with a fast copy: TorchRec's enumerator copies all options, each with a
    shard per rank."""

    @classmethod
    def like(cls, option: ShardingOption) -> Self:
        """Makes it from an option of TorchRec's enumerator."""
        copied = cls.__new__(cls)
        copied.__dict__.update(option.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, object] | None) -> Self:
        rest = copy.copy(self)
        rest.shards = []
        copied = super(CopiedOption, rest).__deepcopy__(memo)
        # Sizes are shared: they are not changed after the enumeration.
        copied.shards = [
            Shard(each.size, each.offset, _clone(each.storage), _clone(each.perf), each.rank)
            for each in self.shards
        ]
        return copied


_T = TypeVar("_T")


def _clone(value: _T) -> _T:
    """A copy of an object with plain attributes, without the work of the module ``copy``."""
    if value is None:
        return value
    copied = object.__new__(type(value))
    copied.__dict__.update(value.__dict__)
    return copied


class BackendShardingOption(CopiedOption):
    """A sharding option for a table on a backend. TorchRec sees one kernel for all backends.

    Attributes:
        backend: name of the backend.
        backend_options: its options for the table.
        label: identifies the alternative among those of the table.
        is_open: whether variants of the options may be used.
        origin: the enumerated option that this is a variant of; None if it is none.
        table_shards: the shards in the form that backends take, once their sizes are final. Shards
            of one size share one object.
        stock_times: TorchRec's time estimate for each shard, which is the same for variants.
    """

    backend: str
    backend_options: BackendOptions
    label: str
    is_open: bool
    origin: BackendShardingOption | None = None
    table_shards: list[TableShard] | None = None
    stock_times: list[Perf] | None = None

    @classmethod
    def of(cls, option: ShardingOption, candidate: Candidate) -> BackendShardingOption:
        """Makes it from an option of TorchRec's enumerator."""
        option_copy = cls.like(option)
        option_copy.backend, option_copy.backend_options = candidate.backend, candidate.options
        option_copy.label, option_copy.is_open = candidate.label, candidate.is_open
        return option_copy

    def variant(self, options: BackendOptions) -> BackendShardingOption:
        """A copy with other options of the backend, without memory and times."""
        copied = copy.copy(self)
        copied.backend_options, copied.is_open, copied.origin = options, False, self
        # Sizes are shared: they are not changed after the enumeration.
        copied.shards = [Shard(shard.size, shard.offset) for shard in self.shards]
        copied.table_shards = shared_shards(copied)
        return copied

    def __deepcopy__(self, memo: dict[int, object] | None) -> BackendShardingOption:
        copied = copy.copy(self)
        copied.origin = copied.table_shards = None  # another process does not need them
        return super(BackendShardingOption, copied).__deepcopy__(memo)

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.label, self.backend_options))

    def storage_hash(self) -> int:
        """TorchRec's hash, which identifies options in saved plans; it differs by backend."""
        text = registry.get(self.backend).describe(self.backend_options)
        return super().storage_hash() ^ zlib.crc32(f"{self.label} {text}".encode())


def is_backend_option(option: ShardingOption) -> TypeGuard[BackendShardingOption]:
    """Whether the option is for a table on a backend."""
    return isinstance(option, BackendShardingOption)


def kernel_of(option: ShardingOption) -> str:
    """The label of a backend option, or the name of the stock kernel."""
    return option.label if is_backend_option(option) else option.compute_kernel


def full_name(option: ShardingOption) -> str:
    """The key of an option's table in the ``state_dict``, without ``.weight``.

    For tables of modules that backends can't serve, TorchRec's name of the table.
    """
    path, module = collection_of(*option.module)
    if isinstance(module, EmbeddingBagCollection):
        return joined(path, f"embedding_bags.{option.name}")
    if isinstance(module, EmbeddingCollection):
        return joined(path, f"embeddings.{option.name}")
    return joined(path, option.name)


def config_of(option: ShardingOption) -> BaseEmbeddingConfig:
    """The config of an option's table."""
    module = option.module[1]
    if module not in _CONFIGS:
        _CONFIGS[module] = {}
    found = _CONFIGS[module].get(option.name)
    if found is None:
        _CONFIGS[module] = table_configs(module)
        found = _CONFIGS[module][option.name]
    return found


def shards_of(option: BackendShardingOption) -> list[TableShard]:
    """The shards of an option's table in the form that backends take."""
    if option.table_shards is not None:
        return option.table_shards
    return config_shards(
        config_of(option),
        option.sharding_type,
        [shard.size for shard in option.shards],
        [shard.offset for shard in option.shards],
        option.backend_options,
    )


def shared_shards(option: BackendShardingOption) -> list[TableShard]:
    """The shards of an option's table. Shards of one size share the object of the first."""
    config, options = config_of(option), option.backend_options
    count = config.num_embeddings
    rows = options.rows_for(count)
    by_size: dict[tuple[int, int], TableShard] = {}
    shards = []
    for shard in option.shards:
        first, end = shard.offset[0], shard.offset[0] + shard.size[0]
        size = (end * rows // count - first * rows // count, shard.size[1])
        if size not in by_size:
            (by_size[size],) = config_shards(
                config, option.sharding_type, [shard.size], [shard.offset], options
            )
        shards.append(by_size[size])
    return shards


def distinct(shards: Sequence[TableShard]) -> list[TableShard]:
    """One shard of each size.

    Args:
        shards: the shards of one option.
    """
    return list({(shard.capacity, shard.dim): shard for shard in reversed(shards)}.values())


def disadvantage(option: ShardingOption) -> str | None:
    """The reason why a stock kernel would serve the table better, or None."""
    if not is_backend_option(option):
        return None
    return registry.get(option.backend).disadvantage(shards_of(option)[0])


def balance(option: BackendShardingOption) -> None:
    """Gives every rank the same capacity if ids are hashed to ranks."""
    if option.sharding_type not in SUMMED_OVER_RANKS:
        return
    if not registry.get(option.backend).routes_by_hash(option.backend_options):
        return
    by_columns: dict[int, list[Shard]] = defaultdict(list)
    for shard in option.shards:
        by_columns[shard.offset[1]].append(shard)
    for shards in by_columns.values():
        sizes, offsets = balanced_rows(option.tensor.shape[0], len(shards))
        for shard, size, offset in zip(shards, sizes, offsets, strict=True):
            shard.size = [size, shard.size[1]]
            shard.offset = [offset, shard.offset[1]]
