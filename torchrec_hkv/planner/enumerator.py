"""Enumerates sharding options of tables, on backends as well as stock kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.modules.embedding_configs import DataType

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import BackendOptions
from torchrec_hkv.planner.calibration import Calibration
from torchrec_hkv.planner.constraints import Candidate, KernelChoice
from torchrec_hkv.planner.losses import NO_LOSS, TableLoss, loss_of
from torchrec_hkv.planner.options import (
    BackendShardingOption,
    CopiedOption,
    balance,
    config_of,
    disadvantage,
    distinct,
    full_name,
    is_backend_option,
    kernel_of,
    shards_of,
    shared_shards,
)
from torchrec_hkv.planner.perf_estimator import PerfEstimator
from torchrec_hkv.planner.stock_kernels import FUSED, FUSED_COLUMNS
from torchrec_hkv.planner.storage_estimator import StorageEstimator
from torchrec_hkv.planner.thinning import EVERY_VARIANT, Thinning, chains_of
from torchrec_hkv.sharding.kernels.optimizer import applied_optimizer, check_fused_optimizer
from torchrec_hkv.sharding.modules.sharders import BackendEmbeddingBagCollectionSharder
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.validation import served_sharding_types


class BackendEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator for translated constraints.

    Attributes:
        refused: reasons why kernels can't serve a table, by path and table, then by kernel.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        choices: Mapping[str, KernelChoice],
        calibration: Calibration | None = None,
    ) -> None:
        """
        Args:
            topology: the topology of the ranks.
            batch_size: batch size of each rank.
            constraints: constraints as translated for TorchRec's planner.
            choices: the kernels that may serve each table.
            calibration: measured constants; None to use the topology's bandwidths.
        """
        self.storage_estimator = StorageEstimator(topology, constraints)
        self.perf_estimator = PerfEstimator(topology, constraints, choices, calibration)
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            estimator=[self.perf_estimator, self.storage_estimator],
        )
        self._choices = choices
        self._losses: dict[tuple, TableLoss] = {}
        # Results for the last enumeration: the options of variants, and the variants of each
        # sharding option by its id().
        self._listed: dict[tuple, list[list[BackendOptions]]] = {}
        self._of_option: dict[int, list[list[BackendOptions]]] = {}
        self._variants: dict[tuple[int, BackendOptions], BackendShardingOption | None] = {}
        self.refused: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Overrides TorchRec's hook, which is called with the options of all tables.

        Args:
            sharding_options: the options; those on backends occur once for each possible backend.
                Options that can't be served are removed.

        Raises:
            ValueError: none of the kernels in a table's constraint can serve it.
        """
        named = self._with_backends(sharding_options)
        served = self._advantageous([option for option in named if self._is_served(option)])
        tables = {(option.path, option.name) for option in served}
        for option in named:
            if (option.path, option.name) not in tables:
                # Sorted, because the order of TorchRec's options is random.
                reasons = sorted(self.refused[option.path, option.name].items())
                raise ValueError(
                    f"Table {full_name(option)!r} can't be served by any of its compute kernels: "
                    + "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons)
                )
        sharding_options[:] = served
        self._listed, self._of_option, self._variants = {}, {}, {}
        super().populate_estimates(sharding_options)

    def variants(
        self, options: Sequence[ShardingOption], thinning: Thinning = EVERY_VARIANT
    ) -> list[ShardingOption]:
        """Variants of options with open sizes, with their memory. :meth:`estimate_times` fills in
        their times.

        Args:
            options: enumerated options.
            thinning: selects variants.
        """
        found: list[BackendShardingOption] = []
        waiting: list[BackendShardingOption] = []
        for option in options:
            if not is_backend_option(option) or not option.is_open:
                continue
            if not thinning.selects((option.path, option.name)):
                continue
            for chosen in thinning.selected(option, self._chains(option)):
                key = (id(option), chosen)
                if key not in self._variants:
                    self._variants[key] = self._variant(option, chosen)
                    waiting += filter(None, [self._variants[key]])
                found += filter(None, [self._variants[key]])
        self.storage_estimator.estimate_variants(waiting)
        return list[ShardingOption](found)

    def _chains(self, option: BackendShardingOption) -> list[list[BackendOptions]]:
        """The options of an option's variants. They are cached, because sharding types may have
        equal shards."""
        if id(option) in self._of_option:
            return self._of_option[id(option)]
        # Shards of a table differ by at most one row or column.
        largest = max(shards_of(option), key=lambda shard: shard.capacity * shard.dim)
        key = (option.path, option.name, option.label, largest.capacity, largest.dim)
        if key not in self._listed:
            optimizer = applied_optimizer(option.name, option.tensor, self.fused_params(option))
            variants = registry.get(option.backend).variants(
                largest, optimizer, self._compute_device, self._choices[option.name].frequencies
            )
            self._listed[key] = chains_of(option.backend_options, variants)
        self._of_option[id(option)] = self._listed[key]
        return self._listed[key]

    def _variant(
        self, option: BackendShardingOption, options: BackendOptions
    ) -> BackendShardingOption | None:
        """A variant of an option, without memory; None if the backend can't serve it."""
        optimizer = applied_optimizer(option.name, option.tensor, self.fused_params(option))
        try:
            variant = option.variant(options)
            for shard in distinct(shards_of(variant)):
                registry.get(option.backend).check(shard, optimizer, self._compute_device)
        except ValueError:
            return None
        return variant if disadvantage(variant) is None else None

    def estimate_times(self, options: Sequence[ShardingOption]) -> None:
        """Fills in the times of variants that have none yet.

        Args:
            options: enumerated options and variants of them.
        """
        waiting = [o for o in options if is_backend_option(o) and o.shards[0].perf is None]
        if waiting:
            self.perf_estimator.estimate_variants(waiting)

    def loss(self, option: ShardingOption) -> TableLoss:
        """The quality that a table loses with an option.

        Args:
            option: an option of a table of the model.
        """
        choice = self._choices.get(option.name)
        if choice is None or not is_backend_option(option):
            return NO_LOSS
        key = (option.path, option.name, option.backend, option.backend_options)
        if key not in self._losses:
            self._losses[key] = loss_of(option, choice.frequencies, choice.curves)
        return self._losses[key]

    def has_own_curves(self, option: ShardingOption) -> bool:
        """Whether the constraint of an option's table has quality curves."""
        choice = self._choices.get(option.name)
        return choice is not None and bool(choice.curves)

    def max_loss(self, option: ShardingOption) -> float | None:
        """Bound on the loss of an option's table; None for no bound."""
        choice = self._choices.get(option.name)
        return None if choice is None else choice.max_loss

    def fused_params(self, option: ShardingOption) -> dict[str, Any] | None:
        """Fused parameters of the sharder of an option's module."""
        return self._sharder_map[option.module_type_key].fused_params

    def _with_backends(self, sharding_options: list[ShardingOption]) -> list[ShardingOption]:
        """Assigns a backend to each option with the customized kernel, in order."""
        waiting: dict[tuple[str, str, str], list[Candidate]] = {}
        named: list[ShardingOption] = []
        for option in sharding_options:
            if option.compute_kernel == KERNEL and not is_backend_option(option):
                key = (option.path, option.name, option.sharding_type)
                if key not in waiting:
                    waiting[key] = self._served(option.name, option.sharding_type)
                option = BackendShardingOption.of(option, waiting[key].pop(0))
            named.append(option if is_backend_option(option) else CopiedOption.like(option))
        return named

    def _served(self, name: str, sharding_type: str) -> list[Candidate]:
        choice = self._choices.get(name)
        return [
            candidate
            for candidate in (() if choice is None else choice.candidates)
            if sharding_type in served_sharding_types(candidate.backend)
        ]

    def _is_served(self, option: ShardingOption) -> bool:
        """Whether the option's kernel can serve its table. If not, the reason is recorded.

        Raises:
            ValueError: the kernel can't serve the table, and there is no other.
        """
        choice = self._choices.get(option.name)
        if choice is None:
            return True
        try:
            self._check_ids(option, choice)
            if is_backend_option(option):
                self._check_backend(option)
            elif choice.candidates:
                self._check_fused(option)
        except ValueError as error:
            if choice.is_settled:
                raise
            self.refused[option.path, option.name][kernel_of(option)] = str(error)
            return False
        return True

    def _advantageous(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Removes options that their backend advises against, if the table has others."""
        advised = {id(option): disadvantage(option) for option in options}
        tables = {(o.path, o.name) for o in options if advised[id(o)] is None}
        advantageous = []
        for option in options:
            reason = advised[id(option)]
            if reason is None or (option.path, option.name) not in tables:
                advantageous.append(option)
            else:
                self.refused[option.path, option.name][kernel_of(option)] = reason
        return advantageous

    def _check_backend(self, option: BackendShardingOption) -> None:
        balance(option)
        option.table_shards = shared_shards(option)
        fused_params = self.fused_params(option)
        optimizer = applied_optimizer(option.name, option.tensor, fused_params)
        for shard in distinct(option.table_shards):
            registry.get(option.backend).check(shard, optimizer, self._compute_device)

    def _check_fused(self, option: ShardingOption) -> None:
        """Raises if FBGEMM's kernels can't hold or train a shard: TorchRec fails only when it
        shards the model."""
        if not option.compute_kernel.startswith(FUSED):
            return
        name = full_name(option)
        for shard in option.shards:
            if shard.size[1] % FUSED_COLUMNS:
                raise ValueError(
                    f"table {name!r}: a shard has {shard.size[1]} columns, but "
                    f"{option.compute_kernel} takes multiples of {FUSED_COLUMNS}."
                )
        if self._compute_device == "cpu" and config_of(option).data_type == DataType.BF16:
            raise ValueError(f"table {name!r}: stock tables lack bf16 rows on a CPU.")
        check_fused_optimizer(name, option.tensor, self.fused_params(option), self._compute_device)

    def _check_ids(self, option: ShardingOption, choice: KernelChoice) -> None:
        """Raises if a kernel takes row numbers but the table has other ids."""
        frequencies = choice.frequencies
        if frequencies is None or frequencies.lowest is None or frequencies.highest is None:
            return
        if is_backend_option(option) and registry.get(option.backend).routes_by_hash(
            option.backend_options
        ):
            return
        rows = config_of(option).num_embeddings
        outside = frequencies.lowest if frequencies.lowest < 0 else frequencies.highest
        if not 0 <= outside < rows:
            raise ValueError(
                f"table '{full_name(option)}': its frequencies have id {outside}, but "
                f"{kernel_of(option)} takes row numbers from 0 to {rows - 1}."
            )

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], *args: Any
    ) -> list[str]:
        choice = self._choices.get(name)
        allowed = allowed_sharding_types
        if choice is not None and not choice.has_stock:
            served = {
                kind for backend in choice.backends for kind in served_sharding_types(backend)
            }
            allowed = [sharding_type for sharding_type in allowed if sharding_type in served]
        elif not (choice and choice.backends) and not self._names_types(name):
            # The sharder offers additional sharding types, which are for tables on backends only.
            sharder = self._sharder_map.get(args[0]) if args else None
            added = (
                sharder.added_sharding_types(self._compute_device)
                if isinstance(sharder, BackendEmbeddingBagCollectionSharder)
                else []
            )
            allowed = [sharding_type for sharding_type in allowed if sharding_type not in added]
        return super()._filter_sharding_types(name, allowed, *args)

    def _names_types(self, name: str) -> bool:
        constraint = (self._constraints or {}).get(name)
        return constraint is not None and bool(constraint.sharding_types)

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        # TorchRec allows a table without constraints any kernel of the sharder. It creates an
        # option per kernel in the list, so the kernel is repeated for each backend.
        served = self._served(name, sharding_type)
        allowed = [kernel for kernel in allowed_compute_kernels if kernel != KERNEL or served]
        kernels = super()._filter_compute_kernels(name, allowed, sharding_type)
        return [kernel for kernel in kernels for _ in (served if kernel == KERNEL else [None])]
