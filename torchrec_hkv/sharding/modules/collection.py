"""The common part of sharded collections of bags and of sequences with tables on backends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingType

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import GroupLookup, OptimizerSpec
from torchrec_hkv.collective import on_every_rank
from torchrec_hkv.compat import is_2d, to_keyed_jagged_tensor
from torchrec_hkv.sharding.dists.exchange_groups import Exchange, ExchangeGroup, has_backend_tables
from torchrec_hkv.sharding.dists.scores import ScoreWire
from torchrec_hkv.sharding.dists.uniqueness import Uniqueness, check_batch
from torchrec_hkv.sharding.kernels.kernel import BackendKernel
from torchrec_hkv.sharding.kernels.placeholder import clip_notice, placeholder
from torchrec_hkv.sharding.modules.open_lookups import collect_open_lookups
from torchrec_hkv.sharding.modules.recipe import Recipe
from torchrec_hkv.sharding.state.replicated_state import ReplicatedState
from torchrec_hkv.sharding.state.sharded_state import ShardedTableState
from torchrec_hkv.sharding.state.state_exchange import exchange_state
from torchrec_hkv.sharding.validation import PlannedTable


@dataclasses.dataclass(frozen=True)
class ShardedTable:
    """A table on a backend in a model.

    Attributes:
        collection: the collection of the table.
        name: name of the table.
        planned: the table in the plan.
        state: the distribution of its state over the ranks.
        has_files: whether checkpoints store it in its own files (:meth:`Backend.saves_files`).
    """

    collection: BackendCollection
    name: str
    planned: PlannedTable
    state: ShardedTableState
    has_files: bool


_skips_file_tables: ContextVar[bool] = ContextVar("tables aside", default=False)


@contextlib.contextmanager
def skip_file_tables() -> Iterator[None]:
    """A context in which ``state_dict`` and ``load_state_dict`` skip tables that checkpoints store
    in their own files."""
    token = _skips_file_tables.set(True)
    try:
        yield
    finally:
        _skips_file_tables.reset(token)


_NO_COPY = (
    "model can't be copied or pickled, since its process groups can't: save it with "
    "torchrec_hkv.checkpoint.save, shard a second one, and load that with "
    "torchrec_hkv.checkpoint.load."
)


class BackendCollection:
    """Makes TorchRec's sharded collections work with kernels from outside TorchRec.

    A mixin, to be placed before TorchRec's class. Its attributes are set before TorchRec's
    ``__init__`` runs, because ``__init__`` calls methods that need them. No attribute is a module
    or a parameter.
    """

    #: TorchRec's attribute that holds the modules of tables; also a part of their names.
    tables_attribute: ClassVar[str]
    #: TorchRec's attribute that holds the configs.
    configs_attribute: ClassVar[str]

    #: The arguments it was created with; set by its sharder.
    recipe: Recipe | None = None

    #: Sharding types for which TorchRec asks for all tables by name.
    unsplit_types: ClassVar[tuple[str, ...]] = ()
    #: Sharding types whose exchange groups become parts of one sharding if one of their tables is
    #: on a backend.
    multi_part_types: ClassVar[tuple[str, ...]] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(f"A sharded {_NO_COPY}")

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"A sharded {_NO_COPY}")

    def __init__(
        self,
        *args: Any,
        planned: dict[str, PlannedTable],
        exchange: Exchange,
        uniqueness: Uniqueness,
        score_wire: ScoreWire | None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: arguments of TorchRec's class.
            planned: the tables on backends by name, already checked.
            exchange: the exchange groups and wire dtypes of the tables.
            uniqueness: the tables that are declared duplicate-free.
            score_wire: how scores are sent; None if no table takes scores.
            kwargs: keyword arguments of TorchRec's class.
        """
        self._planned = planned
        self._exchange = exchange
        self._uniqueness = uniqueness
        self._score_wire = score_wire
        self._is_split = exchange.is_plain and score_wire is None
        self._is_built = False
        # Features of dense-compatible tables: (feature, table, number of rows).
        self._row_numbers = [
            (feature, name, table.shards[0].num_embeddings)
            for name, table in planned.items()
            if registry.get(table.backend).is_dense(table.shards[0].options)
            for feature in table.features
        ]
        super().__init__(*args, **kwargs)
        self._is_built = True
        if not self._is_split:
            raise ValueError(
                "num_groups, wire_dtype and eviction 'customized' need a TorchRec whose "
                "collections have create_grouped_sharding_infos, which this one lacks: leave them "
                "out, or use another TorchRec."
            )
        if score_wire is not None:
            score_wire.install(self._lookups)
        features = {
            config.name: list(config.feature_names)
            for config in getattr(self, self.configs_attribute)
        }
        uniqueness.check_tables(features, planned, getattr(self, "_use_index_dedup", False))
        self._unique_features = {
            table: names for table, names in features.items() if uniqueness.has_unique(table)
        }

    def _check_unique(self, features: Any) -> None:
        """Raises if a batch repeats an id of a table that was declared duplicate-free."""
        if self._uniqueness.is_checked and self._unique_features:
            check_batch(
                to_keyed_jagged_tensor(features), self._unique_features, "in a batch of a rank"
            )

    def create_grouped_sharding_infos(self, *args: Any, **kwargs: Any) -> dict[str, list[Any]]:
        """Overrides TorchRec's hook: groups the tables that are exchanged together."""
        by_type = super().create_grouped_sharding_infos(*args, **kwargs)
        self._is_split = True
        groups = by_type if self._exchange.is_plain else self._split(by_type)
        if self._score_wire is not None:
            # TorchRec's own shardings do not send scores.
            groups = {
                key: ExchangeGroup.for_backend_sharding(infos) for key, infos in groups.items()
            }
        return groups

    def _split(self, by_type: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Splits the tables of each sharding type into exchange groups."""
        infos = [info for type_infos in by_type.values() for info in type_infos]
        configs = {id(info): info.embedding_config for info in infos}
        self._exchange.check_tables([config.name for config in configs.values()])
        return self._exchange.split(
            by_type,
            {key: config.name for key, config in configs.items()},
            {
                key: config.embedding_dim * len(config.feature_names)
                for key, config in configs.items()
            },
            self.unsplit_types,
            [key for key in self.multi_part_types if has_backend_tables(by_type.get(key, ()))],
        )

    def reset_parameters(self) -> None:
        """Initializes the stock tables. Rows on backends are initialized when they are inserted."""
        with self._without_our_configs():
            super().reset_parameters()

    @contextlib.contextmanager
    def _without_our_configs(self) -> Iterator[None]:
        """Hides the tables on backends from code of the base class that expects stock tables."""
        configs = getattr(self, self.configs_attribute)
        stock = [config for config in configs if config.name not in self._planned]
        setattr(self, self.configs_attribute, stock)
        try:
            yield
        finally:
            setattr(self, self.configs_attribute, configs)

    @property
    def has_backends(self) -> bool:
        """Whether backends serve tables of the collection on any rank."""
        return bool(self._planned)

    def group_lookups(self) -> dict[str, GroupLookup]:
        """The lookup of each shard on a backend that this rank holds, by shard key.

        The key is the table's name, followed by ``/`` and the first column if that is not 0
        (:attr:`torchrec_hkv.backends.TableShard.key`).
        """
        return {
            shard.key: kernel.emb_module
            for lookup in self._lookups
            for kernel in lookup.modules()
            if isinstance(kernel, BackendKernel)
            for shard in kernel.shards
        }

    def _initialize_torch_state(self, *args: bool, **kwargs: bool) -> None:
        # TorchRec passes ``skip_registering``, except to the EmbeddingCollection of 1.6.
        super()._initialize_torch_state(*args, **kwargs)
        skip_registering = next(iter([*args, *kwargs.values()]), False)
        self._register_absent_tables()
        self._table_states: dict[str, ShardedTableState] = {}
        for name, table in self._planned.items():
            backend = registry.get(table.backend)
            self._table_states[name] = (
                ReplicatedState.of_table(backend, table.shards[0], table.optimizer)
                if table.sharding.sharding_type == ShardingType.DATA_PARALLEL.value
                else ShardedTableState.of(backend, table.sharding, table.shards, table.optimizer)
            )
        if not skip_registering:
            self._register_state_dict_hook(_export_tables)

    def _register_absent_tables(self) -> None:
        """Registers the parameters of tables without a shard, and thus without a kernel, here."""
        device = self._device or torch.device("cpu")
        absent: dict[OptimizerSpec, list[str]] = {}
        for name, table in self._planned.items():
            if not hasattr(self._table_module(name), "weight"):
                absent.setdefault(table.optimizer, []).append(name)
        for optimizer, names in absent.items():
            notice = clip_notice(names, optimizer)
            for name in names:
                shard = self._planned[name].shards[0]
                parameter = placeholder(shard.dim, shard.dtype, device, notice)
                self._table_module(name).register_parameter("weight", parameter)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards, in a ``DMPCollection``; None elsewhere."""
        return self._env.replica_pg if is_2d(self._env) else None

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank saves its shards, because no earlier rank holds the same shards."""
        group = self.replica_group
        return group is None or dist.get_rank(group) == 0

    @property
    def sharding_group(self) -> dist.ProcessGroup | None:
        """The ranks that the tables are spread over."""
        return self._env.sharding_pg if is_2d(self._env) else self._env.process_group

    def sharded_tables(self) -> dict[str, ShardedTable]:
        """The tables on backends by name, whether or not this rank holds a shard of them."""
        return {name: self._sharded_table(name) for name in self._planned}

    def _sharded_table(self, name: str) -> ShardedTable:
        planned = self._planned[name]
        backend = registry.get(planned.backend)
        return ShardedTable(
            self,
            name,
            planned,
            self._table_states[name],
            backend.saves_files(planned.shards[0].options),
        )

    def _table_module(self, name: str) -> nn.Module:
        return getattr(self, self.tables_attribute)[name]

    def _load_tables(
        self, state_dict: dict[str, Any], prefix: str, missing_keys: list[str]
    ) -> None:
        """Takes the tables on backends out of a state dict and loads them. Checks all of them
        first.

        Args:
            state_dict: the state dict. Entries of tables on backends are removed, except for their
                placeholders.
            prefix: prefix of this module.
            missing_keys: the names of missing tensors are appended.
        """
        loads: list[tuple[str, dict[str, torch.Tensor]]] = []
        exchanged: dict[str, dict[str, torch.Tensor]] = {}
        loaded_keys: list[str] = []
        for name, state in self._table_states.items():
            table_prefix = f"{prefix}{self.tables_attribute}.{name}."
            present = {key: f"{table_prefix}{key}" for key in state.keys}
            present = {key: path for key, path in present.items() if path in state_dict}
            loaded_keys.extend(present.values())
            if _skips_file_tables.get() and self._sharded_table(name).has_files:
                continue
            if not self._is_built and not state.is_dense:
                # TorchRec copies the rows of the unsharded module here; tables on backends are
                # empty at first.
                continue
            if present:
                tensors = {key: state_dict[path] for key, path in present.items()}
                if state.layout is None:
                    loads.extend(state.local_states(dist.get_rank(), tensors).items())
                else:
                    exchanged[name] = tensors
            else:
                missing_keys.extend(f"{table_prefix}{key}" for key in state.keys)
        lookups = self.group_lookups()
        if exchanged or loads:
            collect_open_lookups(lookups.values())
        if exchanged:
            self._exchange_tensors(exchanged)
        for key, local in loads:
            lookups[key].load_table(key, local)
        for path in loaded_keys:
            del state_dict[path]
        # A state dict has no placeholders, but nn.Module expects one per parameter.
        for name in self._table_states:
            parameter = self._table_module(name).weight
            state_dict[f"{prefix}{self.tables_attribute}.{name}.weight"] = parameter.detach()

    def _exchange_tensors(self, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        """Loads tables whose entries may have to move between ranks. Checks all of them first."""
        pg, rank, lookups = self.sharding_group, dist.get_rank(), self.group_lookups()
        local: dict[str, dict[str, dict[str, torch.Tensor]]] = {}

        def check() -> None:
            for name, tensor in tensors.items():
                local[name] = self._table_states[name].local_states(rank, tensor)

        on_every_rank(check, pg)
        table_states: dict[GroupLookup, dict[str, torch.Tensor]] = {}
        for name, shards in local.items():
            state = self._table_states[name]
            loads = {
                shard.key: lookups[shard.key].open_entries(shard.key, state.owners(shard))
                for shard, holder in zip(state.shards, state.ranks, strict=True)
                if holder == rank
            }
            device = self._device or torch.device("cpu")
            table_state = exchange_state(state, shards, loads, device, pg)
            for key in loads:
                table_states.setdefault(lookups[key], {})[key] = table_state
        for lookup, of_keys in table_states.items():
            lookup.entries_loaded(of_keys)


def _export_tables(
    module: BackendCollection,
    destination: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
) -> None:
    lookups = module.group_lookups()
    rank = dist.get_rank()
    for name, state in module._table_states.items():
        if _skips_file_tables.get() and module._sharded_table(name).has_files:
            destination.pop(f"{prefix}{module.tables_attribute}.{name}.weight", None)
            continue
        exported = {key: lookups[key].export_table(key) for key in state.keys_on(rank)}
        table_prefix = f"{prefix}{module.tables_attribute}.{name}."
        destination.pop(f"{table_prefix}weight", None)
        for key, tensor in state.sharded_tensors(rank, exported).items():
            destination[f"{table_prefix}{key}"] = tensor
