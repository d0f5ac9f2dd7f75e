"""The base of modules of hash tables: moving, copying, saving, and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_hkv.hash_table import EvictionPolicy, Initializer, Optimizer, TableGroup
from torchrec_hkv.hash_table.eviction import EPOCH_POLICIES
from torchrec_hkv.hash_table.spec_checks import check_range
from torchrec_hkv.nn.arguments import (
    check_int,
    check_rate,
    check_tensor,
    device_or_default,
    flat_ids,
    flat_scores,
)
from torchrec_hkv.nn.capacity import HbmLimits, gib_to_bytes
from torchrec_hkv.nn.contents import positions
from torchrec_hkv.nn.marker import Marker
from torchrec_hkv.nn.module_state import load_state, saved_names, saved_state
from torchrec_hkv.nn.replicas import refuse_replicas
from torchrec_hkv.nn.table_plan import checked_plan
from torchrec_hkv.nn.tables import Progress, Tables

_INSTEAD_OF_REPLICAS = (
    "shard tables with DistributedModelParallel and the backend 'hkv', or keep this embedding "
    "outside of the module that is wrapped"
)


class TableModule(nn.Module):
    """Base of modules with hash tables of one dim.

    Args:
        names: names of the tables.
        prefixes: prefix of each table's keys in a ``state_dict``.
        embedding_dim: number of columns of a row.
        max_capacity: maximal number of rows of each table.
        init_capacity: number of rows that each table has memory for at first.
        max_hbm_gb: limit of HBM for each table in GiB.
        learning_rate: learning rate of the built-in SGD.
        weight_decay: weight decay of optimizers that do not set another.
        grad_buffer_hbm_gb: limit of memory for stored gradients of all tables in GiB.
        padding_idx: an id whose row is zeros and is not trained.
        eviction: the eviction policy.
        initializer: initializer of new rows.
        seed: seed of new rows.
        device: device of the tables.
        remember_evicted: number of evicted ids that each table remembers.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        prefixes: Sequence[str],
        embedding_dim: int,
        max_capacity: int,
        init_capacity: int | None,
        max_hbm_gb: float | None,
        learning_rate: float,
        weight_decay: float,
        grad_buffer_hbm_gb: float,
        padding_idx: int | None,
        eviction: EvictionPolicy,
        initializer: Initializer | None,
        seed: int | None,
        device: torch.device | str | None,
        remember_evicted: int | None,
    ) -> None:
        super().__init__()
        if padding_idx is not None:
            check_int("padding_idx", padding_idx, -(1 << 63), (1 << 63) - 1)
        check_rate("learning_rate", learning_rate)
        plan = checked_plan(
            type(self).__name__,
            names=names,
            embedding_dim=embedding_dim,
            max_capacity=max_capacity,
            init_capacity=init_capacity,
            max_hbm_gb=max_hbm_gb,
            weight_decay=weight_decay,
            grad_buffer_hbm_gb=grad_buffer_hbm_gb,
            eviction=eviction,
            initializer=initializer,
            seed=seed,
            device=device,
            remember_evicted=remember_evicted,
        )
        self.embedding_dim = embedding_dim
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.padding_idx = padding_idx
        self._prefixes = tuple(prefixes)
        self.anchor = nn.Parameter(torch.zeros(1, device=plan.device))
        #: The optimizer that was attached last.
        self._owner: object | None = None
        self._tables = Tables(plan, Marker(self.anchor))

    # -- lookups ----------------------------------------------------------------------------------

    # In a compiled graph, ops get a copy of the counters but also write to the original. The graph
    # would also be compiled again for each step, because each pin has its own number.
    @torch.compiler.disable
    def _lookup(
        self, ids: Sequence[Tensor], scores: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Looks up rows, one tensor per table.

        Args:
            ids: ids of each table, of any shape.
            scores: scores of each table's ids; None without scores.
        """
        flat = [flat_ids(part, self._tables.group.device) for part in ids]
        training = self.training and torch.is_grad_enabled() and self.anchor.requires_grad
        if training:
            refuse_replicas("hash tables of torchrec_hkv.nn", _INSTEAD_OF_REPLICAS)
        given = flat_scores(self._tables.plan.eviction, ids, scores, training)
        rows = self._tables.lookup(flat, self.padding_idx, training, given)
        # Slices only if needed, because the backward of a slice writes another gradient.
        return [
            (of_table[: part.numel()] if part.numel() < len(of_table) else of_table).view(
                *part.shape, self.embedding_dim
            )
            for of_table, part in zip(rows, ids, strict=True)
        ]

    # -- training ---------------------------------------------------------------------------------

    def attach(self, owner: object, optimizer: Optimizer, state_hbm_gb: float | None) -> None:
        """Makes an optimizer train the rows. Their states start from zeros, even in a copied
        module.

        The optimizers of :mod:`torchrec_hkv.nn` call it. An optimizer that was attached before
        can't step any more.

        Args:
            owner: the optimizer that users call.
            optimizer: the optimizer of the kernels.
            state_hbm_gb: limit of GPU memory for the states of each table in GiB; None to count
                states as rows.

        Raises:
            RuntimeError: gradients are stored.
            ValueError: the tables with their states don't fit in memory.
        """
        plan = self._tables.plan
        limits = HbmLimits(
            plan.limits.rows, gib_to_bytes("state_hbm_gb_per_embedding", state_hbm_gb)
        )
        # Removes the old optimizer first, so that states start from zeros even if both are equal.
        stateless = [
            dataclasses.replace(contents, states=contents.states[:, :0])
            for contents in self._tables.contents()
        ]
        plan = dataclasses.replace(plan, optimizer=optimizer, limits=limits)
        self._tables.check_no_gradients()
        if plan != self._tables.plan or optimizer.state_width(self.embedding_dim) > 0:
            steps = torch.zeros_like(self._tables.group.optimizer_steps)
            self._tables.replace(plan, stateless, steps=steps)
        self._tables.is_trained = True
        self._owner = owner

    def apply_gradients(self, learning_rate: float | Tensor | None = None) -> None:
        """Updates each row once by its stored gradients, and drops the gradients.

        Without an HKV optimizer, a module trains by SGD, and this method is its step. ``step()`` of
        an HKV optimizer calls it.

        Args:
            learning_rate: learning rate; None for the module's.
        """
        rate = self.learning_rate if learning_rate is None else learning_rate
        self.apply_scaled_gradients(rate, None)

    def apply_scaled_gradients(self, learning_rate: float | Tensor, scale: Tensor | None) -> None:
        """Like :meth:`apply_gradients`, for a loss that a ``GradScaler`` may have scaled.

        Args:
            learning_rate: learning rate of this update.
            scale: scale by which gradients are divided; None without a scaler. With a scaler,
                gradients are dropped unless all are finite.
        """
        check_rate("learning_rate", learning_rate, or_tensor=True)
        self._tables.apply(learning_rate, scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the stored gradients, for any ``set_to_none``. ``zero_grad`` of a parent module
        does the same."""
        self._tables.drop()

    @property
    def owner(self) -> object | None:
        """The optimizer that was attached last; None after copying and loading a pickle."""
        return self._owner

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """For each table ``ids``, ``states`` and ``step``; see ``RowOptimizer.state_dict``."""
        steps = self._tables.group.optimizer_steps.cpu()
        return [
            {"ids": contents.ids, "states": contents.states, "step": step}
            for contents, step in zip(self._tables.contents(), steps, strict=True)
        ]

    def check_optimizer_states(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Raises ValueError if :meth:`load_optimizer_states` can't take these states."""
        names = self._tables.plan.names
        if len(states) != len(names):
            raise ValueError(f"The states are of {len(states)} tables, but there are {len(names)}.")
        width = self._tables.plan.optimizer.state_width(self.embedding_dim)
        for name, state, contents in zip(names, states, self._tables.contents(), strict=True):
            n = state["ids"].numel()
            check_tensor("ids", state["ids"], torch.int64, (n,))
            check_tensor("states", state["states"], torch.float32, (n, width))
            check_tensor("step", state["step"], torch.int64, ())
            missing = n - int(positions(contents.ids, state["ids"].cpu())[0].sum())
            if missing:
                raise ValueError(
                    f"The state_dict has states of {missing} ids that {name!r} does not hold: load "
                    "the embedding's state_dict before its optimizer's."
                )

    def load_optimizer_states(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Sets the states of rows; zeros for rows without states in ``states``."""
        contents = [
            table.with_states(state["ids"].cpu(), state["states"].cpu())
            for table, state in zip(self._tables.contents(), states, strict=True)
        ]
        steps = torch.stack([state["step"] for state in states])
        self._tables.replace(self._tables.plan, contents, steps=steps)

    # -- properties -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._tables.group.device

    @property
    def group(self) -> TableGroup:
        """The group of the tables. It is replaced when the module is moved, loaded or given to an
        optimizer."""
        return self._tables.group

    @property
    def epoch(self) -> int:
        """The epoch of later lookups under ``"epoch_lru"`` and ``"epoch_lfu"``, 0 to 2^32 - 1. Set
        it at the start of an epoch. A full table evicts ids of earlier epochs first."""
        return self._tables.group.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        eviction = self._tables.plan.eviction
        if eviction not in EPOCH_POLICIES:
            raise ValueError(
                f"eviction {eviction!r} has no epochs: use 'epoch_lru' or 'epoch_lfu'."
            )
        check_range(type(self).__name__, "epoch", epoch, 0, (1 << 32) - 1)
        self._tables.group.set_epoch(epoch)

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the tables."""
        return self._tables.plan.names

    @property
    def seed(self) -> int:
        """Seed of the initial rows."""
        return self._tables.plan.seed

    @property
    def initializer(self) -> Initializer:
        """Distribution of the initial rows."""
        return self._tables.plan.initializer

    @property
    def capacity(self) -> int:
        """Maximal number of rows of each table; less than ``max_capacity`` if memory is short."""
        return self._tables.capacity

    @property
    def grad_buffer_bytes(self) -> int:
        """Bytes of the stored gradients."""
        return self._tables.gradient_bytes

    def counters(self) -> dict[str, dict[str, int]]:
        """Counters, size and capacity of each table, by name. Synchronizes with the device.

        See :meth:`torchrec_hkv.hash_table.TableGroup.counters`.
        """
        return dict(zip(self._tables.plan.names, self._tables.group.counters(), strict=True))

    def extra_repr(self) -> str:
        plan = self._tables.plan
        return (
            f"{plan.dim}, tables={len(plan.names)}, capacity={self.capacity}, "
            f"eviction={plan.eviction}, optimizer={plan.optimizer}, device={self.device}"
        )

    # -- moving, copying, saving ------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        moved = fn(self.anchor.detach().clone())  # a copy, because the call may be refused
        if moved.dtype != torch.float32:
            raise TypeError(
                f"{type(self).__name__} has rows of float32 and can't be made {moved.dtype}: its "
                "rows are float32 under autocast, too."
            )
        if moved.device.type not in ("cpu", "cuda") or (moved.is_shared() and not moved.is_cuda):
            raise ValueError(
                f"{type(self).__name__} can't be on device {moved.device} or in shared memory: its "
                "tables are on a CPU or a CUDA device."
            )
        if moved.device != self.device:
            plan = dataclasses.replace(self._tables.plan, device=device_or_default(moved.device))
            self._tables.replace(plan)
        before = self.anchor
        super()._apply(fn, recurse)
        if self.anchor is not before:
            self._tables.marker.bind(self.anchor)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_parameters"] = {k: v for k, v in self._parameters.items() if k != "anchor"}
        del state["_tables"]
        state["_owner"] = None
        group = self._tables.group
        steps = group.optimizer_steps.cpu()
        state["_saved"] = (
            self._tables.plan,
            self._tables.contents(),
            Progress.read(group),
            steps,
        )
        state["_saved_training"] = (self._tables.is_trained, self.anchor.requires_grad)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        plan, contents, progress, steps = state.pop("_saved")
        is_trained, requires_grad = state.pop("_saved_training")
        super().__setstate__(state)
        if plan.device.type == "cuda" and not torch.cuda.is_available():
            plan = dataclasses.replace(plan, device=torch.device("cpu"))
        self.anchor = nn.Parameter(torch.zeros(1, device=plan.device))
        self._tables = Tables(plan, Marker(self.anchor))
        self._tables.replace(plan, contents, progress, steps)
        self._tables.is_trained = is_trained
        self.anchor.requires_grad_(requires_grad)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, tensor in saved_state(self._tables, self._prefixes).items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = saved_names(self._tables.plan, self._prefixes)
        missing = [prefix + name for name in names if prefix + name not in state_dict]
        keys = [key for key in state_dict if key.startswith(prefix)]
        unexpected_keys.extend(k for k in keys if k.removeprefix(prefix) not in names and strict)
        if missing:
            missing_keys.extend(missing)
            return
        saved = {name: state_dict[prefix + name] for name in names}
        try:
            load_state(self._tables, self._prefixes, saved)
        except (RuntimeError, TypeError, ValueError) as error:
            error_msgs.append(f"{prefix or type(self).__name__}: {error}")
