"""The interface of a backend. Sharding, planner and checkpoint know tables only through it.

A backend stores and trains the tables whose planner constraints name it. It is one object,
registered under its name (:mod:`torchrec_hkv.backends.registry`). :mod:`torchrec_hkv.sharding`
implements TorchRec's side (input distribution, collectives, output distribution) once, for all
backends, against the classes of this module.
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
    """The tables of one group on one rank: one lookup for all of them, trained in its backward."""

    @property
    def is_training_lookup(self) -> bool:
        """Whether a lookup made now is a training lookup: in training mode, with autograd enabled.

        All other lookups are evaluation lookups: those in ``eval()`` mode, and those under
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
            batch_size: number of bags of each feature.
            learning_rate: float32 ``[]`` on the tables' device. The backward reads its value when
                it runs, so the value may change between replays of a CUDA graph.

        Returns:
            ``[batch_size, sum of the dims of the features' tables]``, of the dtype given to
            :meth:`set_output_dtype`, float32 by default. It requires grad in a training lookup.

        Raises:
            ValueError: ``ids`` has another dtype, or ``offsets`` or ``weights`` another length.
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
        """Pools the rows of each bag, like :meth:`forward`, but each feature has its own number of
        bags.

        Used for batches of variable size, and for sequences, where each id is a bag. The default
        calls :meth:`forward`; a backend with a kernel for ragged bags overrides it.

        Args:
            ids: int64 ``[n]``, feature-major.
            offsets: int64 ``[sum of bags + 1]`` into ``ids``, feature-major.
            weights: float32 ``[n]`` or None.
            bags: number of bags of each feature.
            dims: number of columns of each feature.
            learning_rate: float32 ``[]``, see :meth:`forward`.

        Returns:
            ``[sum of bags * dims]``: one feature after the other, each as ``[bags, dim]``.
        """

        def lookup(uniform_offsets: torch.Tensor, batch_size: int) -> torch.Tensor:
            return self(ids, uniform_offsets, weights, batch_size, learning_rate)

        return ragged_lookup(lookup, offsets, bags, dims)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of later lookups, 0 to 2^32 - 1, for tables whose options have epochs
        (:attr:`BackendOptions.has_epochs`). The default does nothing."""

    def epoch(self) -> int:
        """The current epoch; 0 by default."""
        return 0

    def set_output_dtype(self, dtype: torch.dtype) -> None:
        """Sets the dtype of the outputs of later lookups, one of :attr:`Backend.output_dtypes`.

        A backend that only returns float32 need not override this.
        """

    def accumulate(self) -> AbstractContextManager[None]:
        """A context in which lookups accumulate gradients: their backward stores the gradient
        instead of updating rows.

        The backward of the next lookup made outside the context applies all stored gradients in
        one update. Only called if :attr:`Backend.accumulates`.
        """
        raise NotImplementedError

    def unchanged(self) -> AbstractContextManager[None]:
        """A context in which the tables do not change: calls of other threads that would change
        them wait.

        Checkpoints are saved in it. The default does not lock anything.
        """
        return nullcontext()

    def replicate(self, process_group: dist.ProcessGroup | None) -> None:
        """Makes the tables replicas of those of the other ranks, for data-parallel sharding. Called
        once, before the first forward.

        The gradient of an update is the mean of the ranks' gradients. All ranks make the same
        number of forwards and backwards in the same order; their batch sizes may differ.

        Raises:
            ValueError: the backend does not support replicas; the default.
        """
        raise ValueError(f"{type(self).__name__} does not support data-parallel sharding.")

    def replica_sync(self, process_group: dist.ProcessGroup) -> ReplicaSync:
        """Called once, before any forward, where other groups of ranks hold the same tables and
        train them by themselves, where :meth:`Backend.check_replicas` allows it.

        Args:
            process_group: the ranks that hold the same shards, one of each group.
        """
        raise NotImplementedError

    def populate_caches(self) -> int:
        """Selects again which rows the tables' caches hold, if they have caches.

        Returns:
            Number of caches; 0 by default.
        """
        return 0

    def dense_states(self, key: str) -> dict[str, torch.Tensor]:
        """The optimizer states of a dense-compatible shard (:meth:`Backend.is_dense`) by FBGEMM's
        names: float32 ``[rows]`` or ``[rows, width]``, and int64 ``[1]`` for a count.

        Every call returns the same tensors, with current values. Values written into them, or into
        the tensor that :meth:`export_table` returns, take effect at the table's next lookup.
        """
        return {}

    @abc.abstractmethod
    def export_table(self, key: str) -> dict[str, torch.Tensor]:
        """A copy of one shard's state, with the tensors of :meth:`Backend.state_spec`.

        Args:
            key: the shard, :attr:`TableShard.key`.
        """

    @abc.abstractmethod
    def load_table(self, key: str, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces the contents of one shard by an exported state.

        Args:
            key: the shard.
            state: a result of :meth:`export_table`.

        Raises:
            ValueError: a tensor is missing or has another shape or dtype. Nothing has changed then.
        """

    def open_entries(self, key: str, owners: tuple[int, int]) -> EntriesLoad:
        """Starts a load of a shard from the state tensors of all shards, if
        :meth:`Backend.exchanges`.

        Args:
            key: the shard.
            owners: range ``[first, end)`` of owner buckets whose ids the shard holds.
        """
        raise NotImplementedError

    def entries_loaded(self, table_states: Mapping[str, torch.Tensor]) -> None:
        """Called after all loads by :meth:`open_entries` are complete.

        Args:
            table_states: the tensor ``"table_state"`` of each loaded shard, by shard key.
        """

    def ids(self, key: str, batch: int) -> Iterator[torch.Tensor]:
        """The ids in a shard: int64 CPU tensors of at most ``batch`` ids."""
        raise ValueError(f"{type(self).__name__} does not give its rows by id.")

    def rows_of(self, key: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ids as an evaluation lookup returns them: float32 ``[n, dim]`` on the CPU.

        Args:
            key: the shard.
            ids: int64 ``[n]`` on the CPU.
        """
        raise ValueError(f"{type(self).__name__} does not give its rows by id.")

    def entries(self, key: str, batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """All entries of a shard of the first column, where :meth:`Backend.exchanges`.

        Yields:
            ``ids`` and what :meth:`entries_of` gives of them, at most ``batch`` at a time, in host
            memory.
        """
        raise NotImplementedError

    def entries_of(self, key: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows, states, scores and last steps of ids by the names of the table's state, in host
        memory. Those that a shard lacks have their initial row and states of 0.

        Args:
            key: the shard's.
            ids: int64 ``[n]``, in host memory.
        """
        raise NotImplementedError

    def without_entries(self, key: str) -> dict[str, torch.Tensor]:
        """What the state of a shard of the first column has besides entries: ``table_state``, and
        counts (:data:`torchrec_hkv.backends.saved.COUNTS`)."""
        raise NotImplementedError

    def put_rows(
        self,
        key: str,
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        owners: tuple[int, int],
    ) -> int:
        """Sets the rows of ids and resets their optimizer states.

        Args:
            key: the shard.
            batches: pairs of ids, int64 ``[n]``, and whole rows, ``[n, embedding_dim]``, on the
                CPU. The shard takes its own ids and columns and skips the rest.
            owners: range ``[first, end)`` of owner buckets whose ids the shard holds.

        Returns:
            Number of the shard's ids that found no slot.

        Raises:
            ValueError: the backend can't store the rows.
        """
        raise ValueError(f"{type(self).__name__} does not take rows by id.")

    def save_files(self, key: str, folder: Path, options: FileOptions) -> None:
        """Writes a shard to a new folder, in bounded memory. Called if :meth:`Backend.saves_files`.

        Raises:
            OSError: writing failed.
        """
        raise NotImplementedError

    def saved_bytes(self, key: str) -> int:
        """About how many bytes :meth:`save_files` writes of a shard, for a progress bar; 0, the
        default, where that is not known."""
        return 0

    def change_tracker(self, key: str) -> Any:
        """What knows which entries of a shard changed since it was last saved with it, for
        :meth:`save_changes`; None where the backend can't tell: the default. It has a method
        ``forget()``, after which all entries count as changed, as they do at first, and a method
        ``see(folder, states, row_dtype)``, for a shard that has just been loaded from a folder:
        from there on it counts what changes. It returns False where it can't.
        """
        return None

    def save_changes(self, key: str, folder: Path, options: FileOptions, tracker: Any) -> None:
        """Like :meth:`save_files`, but writes only the entries that changed since the last call
        with this tracker, if it knows them. :attr:`SavedFolder.is_whole` tells which was written.

        Args:
            key: the shard.
            folder: the new folder.
            options: how to write it.
            tracker: the :meth:`change_tracker` of the same shard.
        """
        raise NotImplementedError

    def open_files(
        self,
        saved: Mapping[str, tuple[Sequence[SavedShard], tuple[int, int]]],
        options: FileOptions,
    ) -> TablesLoad:
        """Starts a load of all tables of the group whose :meth:`Backend.saves_files` is True.

        Args:
            saved: by shard key: all shards of the saved table, and the range ``[first, end)`` of
                owner buckets whose ids the shard to load holds.
            options: how to read the files.
        """
        raise NotImplementedError

    def digest(self, key: str) -> tuple[int, int]:
        """Number of entries of a shard, and a sum of hashes of their values. Called if
        :meth:`Backend.saves_files`.

        The sums over all shards of a table do not depend on the sharding. Column shards that do
        not hold the first column count 0 entries.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def counters(self, key: str) -> dict[str, int]:
        """Counters of a shard since its creation, by name. Synchronizes with the GPU.

        Hash tables return ``lookups``, ``hits``, ``inserted``, ``evicted``, ``refused``,
        ``unadmitted``, ``expired``, ``fetched``, ``written_home``, ``host_hits``, ``returned``,
        ``size`` and ``capacity``.
        """

    def device_counters(self) -> tuple[Sequence[str], torch.Tensor] | None:
        """The counters of all tables, without synchronization; None, the default, if the backend
        can't return them so.

        Returns:
            Shard keys, and int64 ``[tables, 12]`` on the tables' device: ``lookups``, ``hits``,
            ``inserted``, ``evicted``, ``refused``, ``unadmitted``, ``expired``, ``fetched``,
            ``written_home``, ``host_hits``, ``returned``, ``size``. More columns may follow, named
            by :data:`torchrec_hkv.hash_table.groups.counters.DEVICE_COUNTS`.
        """
        return None

    def capacity(self, key: str) -> int:
        """Maximal number of rows of a shard on this rank; 0, the default, if not applicable."""
        return 0

    def memory(self, key: str) -> StorageBytes:
        """Bytes that a shard takes on this rank now; 0 by default."""
        return StorageBytes(hbm=0, host=0)


class Backend(abc.ABC):
    """One kind of table: its options, its limits, its storage and how to create it."""

    #: Name of the backend in ``compute_kernels`` of the constraints.
    name: ClassVar[str]
    #: The options class; its default instance is used if the user gives no options.
    options_type: ClassVar[type[BackendOptions]]
    #: TorchRec sharding types (``ShardingType.….value``) that pooled tables support.
    sharding_types: ClassVar[tuple[str, ...]]
    #: How row-wise sharding maps ids to ranks. ``"hashed"`` takes any int64 and routes by
    #: :func:`torchrec_hkv.hash_table.owner_rank`. ``"block"`` takes row numbers, in contiguous
    #: blocks.
    routing: ClassVar[Literal["hashed", "block"]]

    #: Allowed arguments of :meth:`GroupLookup.set_output_dtype`.
    output_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    #: Whether lookups support :meth:`GroupLookup.accumulate`.
    accumulates: ClassVar[bool] = False

    def routes_by_hash(self, options: BackendOptions) -> bool:
        """Whether ids of a table with these options are mapped to ranks by hash. The default
        follows :attr:`routing`."""
        return self.routing == "hashed"

    def disadvantage(self, shard: TableShard) -> str | None:
        """The reason why a stock kernel would serve the table better; None, the default, if there
        is no such reason. The planner then skips the backend if the table's constraint allows
        other kernels, and warns if it does not."""
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
        """Estimates how much quality a table keeps, compared with a dense row for each id.

        The planner uses options that lose quality only if memory requires it. The default is an
        empty sequence: nothing is lost.

        Args:
            table: the whole table with its options.
            num_embeddings: ``num_embeddings`` of the table's config.
            dtype: data type of the table's config.
            frequencies: frequencies of the table's ids; None if all are equally frequent.
        """
        return ()

    def variants(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        device_type: str,
        frequencies: IdFrequencies | None,
    ) -> Sequence[BackendOptions]:
        """Options that the planner may use instead of the shard's if these leave sizes open, such
        as ranks or bytes in HBM. The planner chooses among them if the table's constraint leaves
        the kernel open. The default is an empty sequence.

        Args:
            shard: the part of the table on one rank.
            optimizer: the fused optimizer; None if the table is not trained.
            device_type: ``"cpu"`` or ``"cuda"``.
            frequencies: frequencies of the table's ids; None if unknown.
        """
        return ()

    def leaves_sizes_open(self, options: BackendOptions) -> bool:
        """Whether the planner must replace these options by one of :meth:`variants`."""
        return False

    def far_share(
        self, shard: TableShard, optimizer: OptimizerSpec | None, load: Workload, device_type: str
    ) -> float:
        """Share of a step's rows that a GPU reads from host memory; 0 by default."""
        return 0.0

    def on_host(self, options: BackendOptions) -> BackendOptions:
        """The same options with all rows in host memory and none in HBM.

        Raises:
            ValueError: the backend does not support it; the default.
        """
        raise ValueError(
            f"Backend {self.name!r} can't keep tables in host memory: place them in HBM."
        )

    def is_dense(self, options: BackendOptions) -> bool:
        """Whether a table with these options takes row numbers and exposes its rows like a stock
        table. Its state then is only ``"weight"``, indexed by row number;
        :meth:`GroupLookup.dense_states` returns its optimizer states."""
        return False

    def identity(self, shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, Any]:
        """The properties in which a saved table and the table that loads it must agree: JSON values
        by user-visible names, equal on all shards of a table."""
        return {
            "dim": shard.embedding_dim,
            "dtype": str(shard.dtype).removeprefix("torch."),
            "optimizer": None if optimizer is None else optimizer.kind,
        }

    def loads(self, what: str, saved: Any, own: Any) -> bool:
        """Whether a table can load a saved one when the item ``what`` of :meth:`identity` is
        ``saved`` there and ``own`` here."""
        return bool(saved == own)

    def exchanges(self, options: BackendOptions) -> bool:
        """Whether the sizes of a table's state tensors do not depend on the number of ranks, so
        that a rank may load entries that belong to other ranks. If so, one-dimensional tensors are
        on the shards of the first column, ``"occupied"`` marks the slots in use, and
        ``"table_state"`` is on the first shard."""
        return False

    def state_geometry(self, shard: TableShard, optimizer: OptimizerSpec | None) -> tuple[int, ...]:
        """Numbers that are equal for two shards with the same slot layout. Used if
        :meth:`exchanges`."""
        return ()

    def saves_files(self, options: BackendOptions) -> bool:
        """Whether checkpoints store a table in its own files (:meth:`GroupLookup.save_files`),
        written in bounded memory and loadable under any sharding. Otherwise its state is in the
        ``state_dict``."""
        return False

    def saved_folder(self, folder: Path) -> SavedFolder:
        """Reads the manifest of a shard's folder. :meth:`verify_file` reads the files it lists.

        Raises:
            ValueError: the folder is damaged.
        """
        raise NotImplementedError

    def merge_files(self, layers: Sequence[Path], folder: Path, options: FileOptions) -> None:
        """Merges a whole shard and later changes of it into a new folder.

        Args:
            layers: folders written by :meth:`GroupLookup.save_changes`, the newest first; the last
                one is whole.
            folder: folder to write. Its manifest equals that of the newest layer, except that it
                is whole.
            options: how to write the files.

        Raises:
            ValueError: a folder is damaged.
            OSError: writing failed.
        """
        raise NotImplementedError

    def verify_file(self, saved: SavedShard, file: str, options: FileOptions) -> None:
        """Reads a file of a shard's folder and checks it.

        Raises:
            ValueError: the file is missing or damaged, holds an id twice, or holds ids of other
                owner buckets than the shard's. The message names the file.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def check(self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str) -> None:
        """Checks whether the backend can serve a table.

        Raises:
            ValueError: it can't. The message names the table, the value and what is allowed.
        """

    @abc.abstractmethod
    def storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        """Bytes of the shard: rows, optimizer states and index."""

    def scratch(
        self, shard: TableShard, load: Workload, device_type: str, replicated: bool
    ) -> StorageBytes:
        """Peak bytes of temporary memory in a step, without :meth:`storage`, the ids and the
        output; 0 by default.

        Args:
            shard: the part of the table on one rank.
            load: the step's ids in the shard.
            device_type: ``"cpu"`` or ``"cuda"``.
            replicated: whether the table is data-parallel, so that its gradient is averaged over
                ranks.
        """
        return StorageBytes(hbm=0, host=0)

    @abc.abstractmethod
    def lookup_bandwidth(self, device_type: str, hbm_bw: float, host_bw: float) -> float:
        """Bytes of rows that a lookup reads in a millisecond, from the topology's bandwidths.

        The planner uses it for backends without calibration (:meth:`calibration_cases`).
        """

    def work(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        load: Workload,
        device_type: str,
    ) -> Work:
        """Amounts of work in a step on a shard; calibrated constants give the time of each unit.

        The default is the work of a table that reads and writes whole rows.

        Args:
            shard: the part of the table on one rank.
            optimizer: the fused optimizer; None if the table is not trained.
            load: the step's ids in the shard.
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        storage = self.storage(shard, optimizer, device_type)
        return row_work(load, shard.dim, (storage.hbm + storage.host) / shard.capacity)

    def calibration_cases(self, device_type: str) -> Sequence[CalibrationCase]:
        """Tables that ``torchrec-hkv calibrate`` times to fit the constants; none by default."""
        return ()

    @abc.abstractmethod
    def state_spec(
        self, shard: TableShard, optimizer: OptimizerSpec | None
    ) -> dict[str, TensorSpec]:
        """The tensors that hold one shard's state. ``"weight"`` holds the rows.

        A ``state_dict`` concatenates them over ranks along the first dimension, so their shapes
        must depend on the shard only.
        """

    @abc.abstractmethod
    def create_lookup(
        self,
        shards: Sequence[TableShard],
        feature_tables: Sequence[int],
        optimizer: OptimizerSpec | None,
        device: torch.device,
    ) -> GroupLookup:
        """Creates the tables of a group.

        Args:
            shards: this rank's part of each table; all have the same dtype and pooling.
            feature_tables: index of the table of each feature of the group.
            optimizer: the fused optimizer; None if no optimizer was applied, so that the tables
                are not trained.
            device: device of the tables.
        """

    def describe(self, options: BackendOptions) -> str:
        """The options that differ from their defaults, for the printed plan."""
        changed: list[str] = []
        for field in dataclasses.fields(options):
            value: Any = getattr(options, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                changed.append(f"{field.name}={value}")
        return ", ".join(changed)
