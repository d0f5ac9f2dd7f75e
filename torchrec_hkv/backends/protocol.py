"""What a backend is: the only thing that sharding, planner and checkpoint know of a kind of table.

A backend stores and trains the tables that name it in the planner's constraints. It is one object,
registered under its name (:mod:`torchrec_hkv.backends.registry`). TorchRec's side (input
distribution, collectives, output distribution) is written once, in :mod:`torchrec_hkv.sharding`,
against the classes of this module.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from torchrec_hkv.backends.calibration import CalibrationCase
from torchrec_hkv.backends.ragged import ragged_lookup
from torchrec_hkv.backends.replicas import ReplicaSync
from torchrec_hkv.backends.saved import (
    EntriesLoad,
    FileOptions,
    SavedFolder,
    SavedShard,
    TablesLoad,
)
from torchrec_hkv.backends.specs import (
    BackendOptions,
    Kept,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
)
from torchrec_hkv.backends.workload import IdFrequencies, Work, Workload, row_work


class GroupLookup(nn.Module, abc.ABC):
    """The tables of one group on one rank, looked up in one call and trained in their backward."""

    @property
    def is_training_lookup(self) -> bool:
        """Whether a lookup made now is a training lookup: in training mode, with autograd on.

        All others are evaluation lookups: in ``eval()`` mode, and in any mode under
        ``torch.no_grad()`` or ``torch.inference_mode()``.
        """
        return self.training and torch.is_grad_enabled()

    @abc.abstractmethod
    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        learning_rate: torch.Tensor,
    ) -> torch.Tensor:
        """Pools the rows of each bag.

        A training lookup (:attr:`is_training_lookup`) inserts missing ids. An evaluation lookup
        changes nothing in the table. The backward applies the optimizer at ``learning_rate`` and
        returns a gradient for ``weights`` only.

        Args:
            ids: int64 ``[n]``, feature-major: all bags of the first feature, then of the second.
            offsets: int64 ``[features * batch_size + 1]`` into ``ids``.
            weights: float32 ``[n]`` or None.
            batch_size: bags a feature.
            learning_rate: float32 ``[]`` on the tables' device. The backward takes what it is then:
                it may change between replays of a CUDA graph.

        Returns:
            ``[batch_size, sum of the dims of the features' tables]``, requiring grad when training;
            of the dtype of :meth:`set_output_dtype`, float32 by default.

        Raises:
            ValueError: ids of another dtype, offsets of another length, weights of another length.
        """

    def forward_ragged(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        bags: Sequence[int],
        dims: Sequence[int],
        learning_rate: torch.Tensor,
    ) -> torch.Tensor:
        """As :meth:`forward`, where each feature has a number of bags of its own.

        Serves batches of variable size, and sequences, whose ids are bags of one. A backend that
        has a kernel for it overrides this; the default goes through :meth:`forward`.

        Args:
            ids: as there.
            offsets: int64 ``[sum of bags + 1]`` into ``ids``, feature-major.
            weights: as there.
            bags: number of bags of each feature.
            dims: columns of each feature.
            learning_rate: as there.

        Returns:
            ``[sum of bags * dims]``: features one after the other, each as ``[bags, dim]``.
        """

        def lookup(uniform_offsets: torch.Tensor, batch_size: int) -> torch.Tensor:
            return self(ids, uniform_offsets, weights, batch_size, learning_rate)

        return ragged_lookup(lookup, offsets, bags, dims)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of lookups to come, 0 to 2^32 - 1, for tables whose options have epochs
        (:attr:`BackendOptions.has_epochs`). The default does nothing."""

    def epoch(self) -> int:
        """The same, as it is; 0 by default."""
        return 0

    def set_output_dtype(self, dtype: torch.dtype) -> None:
        """Says what the outputs of lookups to come are: one of :attr:`Backend.output_dtypes`.

        A backend that has only float32 needs nothing.
        """

    def accumulate(self) -> AbstractContextManager[None]:
        """Within it, lookups are made whose backwards do not train: they hold their gradients.

        The backward of the next lookup that is made outside of it applies all of them together.

        Only asked of backends that say so (:attr:`Backend.accumulates`).
        """
        raise NotImplementedError

    def unchanged(self) -> AbstractContextManager[None]:
        """Within it, the tables stay as they are: calls of other threads that change them wait.

        A checkpoint is saved within it. The default holds nothing.
        """
        return nullcontext()

    def replicate(self, process_group: dist.ProcessGroup | None) -> None:
        """Called once, before any forward, where tables are sharded data-parallel: all ranks of the
        group hold them, and keep them alike from now on.

        The gradient of an update is the mean of the ranks' gradients. Every rank makes as many
        forwards and backwards as the others, in the same order, of batches of any size.

        Raises:
            ValueError: the backend can't; the default.
        """
        raise ValueError(f"{type(self).__name__} can't keep the tables of several ranks alike.")

    def replica_sync(self, process_group: dist.ProcessGroup) -> ReplicaSync:
        """Called once, before any forward, where other groups of ranks hold the same tables and
        train them by themselves, where :meth:`Backend.check_replicas` allows it.

        Args:
            process_group: the ranks that hold the same shards, one of each group.
        """
        raise NotImplementedError

    def populate_caches(self) -> int:
        """Chooses anew what is kept in caches of the tables, where they have any.

        Returns:
            How many caches there are; none by default.
        """
        return 0

    def dense_states(self, key: str) -> dict[str, torch.Tensor]:
        """The optimizer states of a shard whose rows lie open by number, by FBGEMM's names: float32
        ``[rows]`` or ``[rows, width]``, and int64 ``[1]`` for a count.

        Up to date, and the same tensors in every call. What is written into them, and into the
        tensor that :meth:`export_table` gives, is the table's from its next lookup on.
        """
        return {}

    @abc.abstractmethod
    def export_table(self, key: str) -> dict[str, torch.Tensor]:
        """A copy of one shard's state, each tensor as :meth:`Backend.state_spec` says.

        Args:
            key: the shard's (:attr:`TableShard.key`).
        """

    @abc.abstractmethod
    def load_table(self, key: str, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces one shard by an exported state.

        Args:
            key: the shard's.
            state: as :meth:`export_table` gives it.

        Raises:
            ValueError: a tensor is missing or of another shape or dtype; nothing has changed then.
        """

    def open_entries(self, key: str, owners: tuple[int, int]) -> EntriesLoad:
        """The load of a shard from the state of all shards, where :meth:`Backend.exchanges`.

        Args:
            key: the shard's.
            owners: first owner bucket of the ids that it is asked for, and the one past the last.
        """
        raise NotImplementedError

    def entries_loaded(self, table_states: Mapping[str, torch.Tensor]) -> None:
        """Called when all loads by :meth:`open_entries` have ended.

        Args:
            table_states: by the keys of the shards here that were loaded, their ``table_state``.
        """

    def ids(self, key: str, batch: int) -> Iterator[torch.Tensor]:
        """The ids that a shard holds, int64, at most ``batch`` at a time, in host memory."""
        raise ValueError(f"{type(self).__name__} does not give its rows by id.")

    def rows_of(self, key: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ids as an evaluation would look them up, float32 ``[n, dim]``, in host memory.

        Args:
            key: the shard's.
            ids: int64 ``[n]``, in host memory.
        """
        raise ValueError(f"{type(self).__name__} does not give its rows by id.")

    def put_rows(
        self,
        key: str,
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        owners: tuple[int, int],
    ) -> int:
        """Sets the rows of ids; their optimizer states start anew.

        Args:
            key: the shard's.
            batches: ids, int64 ``[n]``, and whole rows, ``[n, embedding_dim]``, in host memory. The
                shard takes the ids that it is asked for, and its columns.
            owners: as in :class:`SavedShard`.

        Returns:
            How many of its ids found no place.

        Raises:
            ValueError: the backend can't have such rows.
        """
        raise ValueError(f"{type(self).__name__} does not take rows by id.")

    def save_files(self, key: str, folder: Path, options: FileOptions) -> None:
        """Writes a shard to a new folder, in bounded memory, where :meth:`Backend.saves_files`.

        Raises:
            OSError: writing failed.
        """
        raise NotImplementedError

    def change_tracker(self, key: str) -> Any:
        """What knows which entries of a shard changed since it was last saved with it, for
        :meth:`save_changes`; None where the backend can't tell: the default. It has a method
        ``forget()``, after which all entries count as changed, as they do at first.
        """
        return None

    def save_changes(self, key: str, folder: Path, options: FileOptions, tracker: Any) -> None:
        """As :meth:`save_files`, but of what changed since the last call with this tracker alone,
        where it can say; :attr:`SavedFolder.is_whole` says whether.

        Args:
            key: the shard's.
            folder: as there.
            options: as there.
            tracker: of :meth:`change_tracker`, of the same shard.
        """
        raise NotImplementedError

    def open_files(
        self,
        saved: Mapping[str, tuple[Sequence[SavedShard], tuple[int, int]]],
        options: FileOptions,
    ) -> TablesLoad:
        """The load of all tables of the group that :meth:`Backend.saves_files`.

        Args:
            saved: by the key of a shard here, all shards of the saved table, and the owner buckets
                of the ids that this shard is asked for, as in :class:`SavedShard`.
            options: of the load.
        """
        raise NotImplementedError

    def digest(self, key: str) -> tuple[int, int]:
        """Number of entries of a shard, and a sum of hashes of all of their values, where
        :meth:`Backend.saves_files`: sums over the shards of a table are the same for the same
        entries, however they are spread. Shards of the same entries' other columns count 0 entries.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def counters(self, key: str) -> dict[str, int]:
        """Counts of a shard since creation, by name (a host synchronisation on a GPU). Hash
        tables give ``lookups``, ``hits``, ``inserted``, ``evicted``, ``refused``, ``unadmitted``,
        ``expired``, ``fetched``, ``written_home``, ``host_hits``, ``returned``, ``size``,
        ``capacity``."""

    def device_counters(self) -> tuple[Sequence[str], torch.Tensor] | None:
        """The counts of all tables without a wait, None where they can't be had so; the default.

        Returns:
            Keys, and int64 ``[tables, 12]`` on the tables' device: ``lookups``, ``hits``,
            ``inserted``, ``evicted``, ``refused``, ``unadmitted``, ``expired``, ``fetched``,
            ``written_home``, ``host_hits``, ``returned``, ``size``. More columns may follow, as
            :data:`torchrec_hkv.hash_table.groups.counters.DEVICE_COUNTS` names them.
        """
        return None

    def capacity(self, key: str) -> int:
        """Rows a table may hold on this rank; 0, the default, where that has no meaning."""
        return 0

    def memory(self, key: str) -> StorageBytes:
        """Bytes a table takes on this rank at present; none by default."""
        return StorageBytes(hbm=0, host=0)


class Backend(abc.ABC):
    """One kind of table."""

    #: What ``compute_kernels`` of the constraints says.
    name: ClassVar[str]
    #: The options class; an instance made without arguments stands for "no options given".
    options_type: ClassVar[type[BackendOptions]]
    #: TorchRec sharding types (``ShardingType.….value``) of pooled tables.
    sharding_types: ClassVar[tuple[str, ...]]
    #: How an id finds its rank under row-wise sharding: ``"hashed"`` takes any int64 and routes by
    #: :func:`torchrec_hkv.hash_table.owner_rank`; ``"block"`` takes row numbers in contiguous
    #: blocks.
    routing: ClassVar[Literal["hashed", "block"]]

    #: What its lookups can give (:meth:`GroupLookup.set_output_dtype`); float32 by default.
    output_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    #: Whether its lookups have :meth:`GroupLookup.accumulate`.
    accumulates: ClassVar[bool] = False

    def routes_by_hash(self, options: BackendOptions) -> bool:
        """Whether ids of a table with these options find their rank by hash: as ``routing`` says,
        where options don't change it."""
        return self.routing == "hashed"

    def disadvantage(self, shard: TableShard) -> str | None:
        """Why the table would be better off on a stock kernel; None, the default, where nothing
        says so. The planner passes such a backend over where the table's constraint names other
        kernels, and warns where it names no other."""
        return None

    def check_replicas(self, shard: TableShard) -> None:
        """Refuses a table whose replicas in a ``DMPCollection`` can't be brought together
        (:meth:`GroupLookup.replica_sync`).

        Raises:
            ValueError: it can't; the default.
        """
        raise ValueError(
            f"Table {shard.name!r} can't be in a DMPCollection: backend {self.name!r} does not "
            "bring replicas together. Use DistributedModelParallel."
        )

    def sync_bytes(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        touched: float,
        touched_anywhere: float,
        replicas: int,
    ) -> float:
        """Bytes that a rank sends for a shard in a sync of replicas; 0 by default. An all-reduce of
        n bytes counts as ``2 n (replicas - 1) / replicas``.

        Args:
            shard: the table's part.
            optimizer: None where it is not trained.
            touched: different ids of the shard that a replica looks up from one sync to the next.
            touched_anywhere: those that some replica looks up.
            replicas: how many.
        """
        return 0.0

    def gradient_bytes(self, shard: TableShard) -> float:
        """Bytes of the gradient that ranks average in a step of a data-parallel table; 0 by
        default.

        Args:
            shard: the whole table.
        """
        return 0.0

    def kept(
        self,
        table: TableShard,
        num_embeddings: int,
        dtype: torch.dtype,
        frequencies: IdFrequencies | None,
    ) -> Sequence[Kept]:
        """What a table keeps of the quality that a dense row for each id would give.

        The planner gives a table such options only where the memory demands it. The default is
        none: nothing is lost.

        Args:
            table: the whole table, with its options.
            num_embeddings: of the table's config.
            dtype: of the table's config.
            frequencies: of the table's ids; None: all come alike.
        """
        return ()

    def variants(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        device_type: str,
        frequencies: IdFrequencies | None,
    ) -> Sequence[BackendOptions]:
        """Options in the place of the shard's where these leave sizes open, such as ranks or bytes
        in HBM. The planner chooses among them where the table's constraint leaves the kernel open.
        None by default.

        Args:
            shard: the part of the table on one rank.
            optimizer: None where it is not trained.
            device_type: where it lives.
            frequencies: of the table's ids; None where they are not known.
        """
        return ()

    def leaves_sizes_open(self, options: BackendOptions) -> bool:
        """Whether the planner must replace these options by one of :meth:`variants`."""
        return False

    def far_share(
        self, shard: TableShard, optimizer: OptimizerSpec | None, load: Workload, device_type: str
    ) -> float:
        """The share of a step's rows that come from host memory to a GPU; none by default."""
        return 0.0

    def on_host(self, options: BackendOptions) -> BackendOptions:
        """These options, with the rows in host memory and none in HBM.

        Raises:
            ValueError: the backend can't; the default.
        """
        raise ValueError(f"Tables on backend {self.name!r} can't lie in host memory.")

    def is_dense(self, options: BackendOptions) -> bool:
        """Whether a table with these options takes row numbers and shows its rows as stock tables
        do. Its state is ``"weight"`` alone then, a tensor by row number, and
        :meth:`GroupLookup.dense_states` has the rest."""
        return False

    def identity(self, shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, Any]:
        """What a saved table and the one that loads it must have in common, in JSON's types and by
        names that users know. The same for all shards of a table."""
        return {
            "dim": shard.embedding_dim,
            "dtype": str(shard.dtype).removeprefix("torch."),
            "optimizer": None if optimizer is None else optimizer.kind,
        }

    def loads(self, what: str, saved: Any, own: Any) -> bool:
        """Whether a table loads a saved one that differs so in ``what``, an item of
        :meth:`identity`."""
        return bool(saved == own)

    def exchanges(self, options: BackendOptions) -> bool:
        """Whether the state of a table has sizes that don't depend on the ranks, so that a rank may
        load places of other ranks' ids. Then tensors of one dimension belong to shards of the first
        column, ``"occupied"`` among them says which places are taken, and ``"table_state"`` is with
        the first shard."""
        return False

    def state_geometry(self, shard: TableShard, optimizer: OptimizerSpec | None) -> tuple[int, ...]:
        """Numbers that are equal where a shard's places mean the same, where :meth:`exchanges`."""
        return ()

    def saves_files(self, options: BackendOptions) -> bool:
        """Whether checkpoints have files of a table's own (:meth:`GroupLookup.save_files`), which
        are written in bounded memory and loaded under any sharding; otherwise its state is in the
        ``state_dict``."""
        return False

    def saved_folder(self, folder: Path) -> SavedFolder:
        """What a shard's folder says of itself; :meth:`verify_file` reads the files that it names.

        Raises:
            ValueError: the folder is damaged.
        """
        raise NotImplementedError

    def merge_files(self, layers: Sequence[Path], folder: Path, options: FileOptions) -> None:
        """Writes a whole shard to a new folder, out of one and of later changes of it.

        Args:
            layers: folders that :meth:`GroupLookup.save_changes` wrote, the newest first, the last
                one whole.
            folder: to write to. It says of itself what the newest says, but that it is whole.
            options: of the files.

        Raises:
            ValueError: a folder is damaged.
            OSError: writing failed.
        """
        raise NotImplementedError

    def verify_file(self, saved: SavedShard, file: str, options: FileOptions) -> None:
        """Reads a file of a shard's folder.

        Raises:
            ValueError: it is missing, damaged, or holds ids of other owner buckets than the
                shard's, or one id twice; the sentence names it.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def check(self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str) -> None:
        """Refuses a table this backend can't serve.

        Raises:
            ValueError: one sentence naming the table, the value and what is allowed.
        """

    @abc.abstractmethod
    def storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        """Bytes the shard takes: rows, optimizer states and index."""

    def scratch(
        self, shard: TableShard, load: Workload, device_type: str, replicated: bool
    ) -> StorageBytes:
        """Bytes of a step at the most, beside :meth:`storage`, its ids and its output; none by
        default.

        Args:
            shard: the table's part.
            load: what the step asks of it.
            device_type: where it lives.
            replicated: every rank holds it, and they average its gradient.
        """
        return StorageBytes(hbm=0, host=0)

    @abc.abstractmethod
    def lookup_bandwidth(self, device_type: str, hbm_bw: float, host_bw: float) -> float:
        """Bytes of rows a millisecond that a lookup reaches, from the topology's bandwidths.

        The planner's estimate where nothing was measured (:meth:`calibration_cases`).
        """

    def work(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        load: Workload,
        device_type: str,
    ) -> Work:
        """What a step does to a shard, as counts that measured constants are per.

        The default is that of tables that read and write whole rows.

        Args:
            shard: the table's part.
            optimizer: None where it is not trained.
            load: what the step asks of it.
            device_type: where it lives.
        """
        storage = self.storage(shard, optimizer, device_type)
        return row_work(load, shard.dim, (storage.hbm + storage.host) / shard.capacity)

    def calibration_cases(self, device_type: str) -> Sequence[CalibrationCase]:
        """The tables that ``torchrec-hkv calibrate`` times to fit constants to; none by default."""
        return ()

    @abc.abstractmethod
    def state_spec(
        self, shard: TableShard, optimizer: OptimizerSpec | None
    ) -> dict[str, TensorSpec]:
        """The tensors that hold one shard's state; ``"weight"`` is the rows.

        Their first dimensions are stacked over ranks in ``state_dict``, so they must depend on
        nothing but the shard.
        """

    @abc.abstractmethod
    def create_lookup(
        self,
        shards: Sequence[TableShard],
        feature_tables: Sequence[int],
        optimizer: OptimizerSpec | None,
        device: torch.device,
    ) -> GroupLookup:
        """Makes the tables of a group.

        Args:
            shards: this rank's part of each table; all share dtype and pooling.
            feature_tables: for each feature of the group, in order, the index of its table.
            optimizer: None when the tables are not trained (no optimizer was applied).
            device: where the tables live.
        """

    def describe(self, options: BackendOptions) -> str:
        """The options that differ from their defaults, for the printed plan."""
        changed: list[str] = []
        for field in dataclasses.fields(options):
            value: Any = getattr(options, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                changed.append(f"{field.name}={value}")
        return ", ".join(changed)
