"""Makes the properties of a module's tables from its arguments, and a group that fits in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from torchrec_hkv.hash_table import (
    SGD,
    EvictionPolicy,
    Initializer,
    Optimizer,
    TableGroup,
    TableSpec,
    Uniform,
)
from torchrec_hkv.hash_table.eviction import POLICIES, check_eviction
from torchrec_hkv.hash_table.spec_checks import check_remember_evicted
from torchrec_hkv.nn.arguments import check_int, device_or_default
from torchrec_hkv.nn.capacity import HbmLimits, TableShape, free_memory, gib_to_bytes
from torchrec_hkv.nn.warn import warn

# Default of init_capacity, in rows.
_INITIAL_CAPACITY = 1 << 16
_MAX_DIM = 2048
#: Upper bound on rows in estimates of memory, more than any device holds.
_MAX_ROWS = 1 << 58


@dataclasses.dataclass(frozen=True)
class Plan:
    """The properties of a module's tables.

    Attributes:
        names: names of the tables; mixed into the seed of initial rows.
        dim: number of columns of their rows.
        max_capacity: maximal number of rows of each table.
        initial_capacity: number of rows that each table has memory for at first.
        eviction: the eviction policy.
        limits: limits of HBM for each table.
        gradient_bytes: maximal memory of stored gradients.
        seed: seed of initial rows.
        initializer: initializer of initial rows.
        optimizer: the optimizer of the tables.
        device: device of the tables.
        remember_evicted: number of evicted ids that each table remembers.
    """

    names: tuple[str, ...]
    dim: int
    max_capacity: int
    initial_capacity: int
    eviction: EvictionPolicy
    limits: HbmLimits
    gradient_bytes: int
    seed: int
    initializer: Initializer
    optimizer: Optimizer
    device: torch.device
    remember_evicted: int | None = None


def checked_plan(
    module: str,
    *,
    names: Sequence[str],
    embedding_dim: int,
    max_capacity: int,
    init_capacity: int | None,
    max_hbm_gb: float | None,
    weight_decay: float,
    grad_buffer_hbm_gb: float,
    eviction: EvictionPolicy,
    initializer: Initializer | None,
    seed: int | None,
    device: torch.device | str | None,
    remember_evicted: int | None,
) -> Plan:
    """Checks the arguments of a module and makes its plan, with SGD as optimizer.

    Args:
        module: name of the module's class, for messages. The other arguments are those of
            :class:`torchrec_hkv.nn.table_module.TableModule`.

    Raises:
        ValueError: an argument has an invalid value.
    """
    check_int("embedding_dim", embedding_dim, 1, _MAX_DIM)
    check_int("max_capacity", max_capacity, 1, _MAX_ROWS)
    if init_capacity is None:
        init_capacity = min(max_capacity, _INITIAL_CAPACITY)
    check_int("init_capacity", init_capacity, 1, max_capacity)
    if seed is None:  # torch.manual_seed determines it, like the weights of other modules
        seed = int(torch.randint((1 << 63) - 1, (), device="cpu"))
    check_int("seed", seed, -(1 << 63), (1 << 63) - 1)
    check_eviction(module, eviction, POLICIES)
    if initializer is None:
        initializer = Uniform(-(embedding_dim**-0.5), embedding_dim**-0.5)
    if not isinstance(initializer, Initializer):
        raise ValueError(
            f"initializer is {initializer!r}, but must be a Uniform, Normal, TruncatedNormal "
            "or Constant of torchrec_hkv.hash_table, or None."
        )
    check_remember_evicted(module, remember_evicted)
    if grad_buffer_hbm_gb is None:
        raise ValueError("grad_buffer_hbm_gb is None, but must be a positive number of GiB.")
    limit = gib_to_bytes("grad_buffer_hbm_gb", grad_buffer_hbm_gb)
    return Plan(
        names=tuple(names),
        dim=embedding_dim,
        max_capacity=max_capacity,
        initial_capacity=init_capacity,
        eviction=eviction,
        limits=HbmLimits(gib_to_bytes("max_hbm_gb", max_hbm_gb)),
        gradient_bytes=limit or 0,
        seed=seed,
        initializer=initializer,
        optimizer=SGD(weight_decay=weight_decay),
        device=device_or_default(device),
        remember_evicted=remember_evicted,
    )


def make_group(plan: Plan) -> tuple[TableGroup, int]:
    """Makes a group; returns it with the capacity of its tables.

    Raises:
        ValueError: not even the initial capacity fits in memory.
    """
    width = plan.optimizer.state_width(plan.dim)
    shape = TableShape(
        len(plan.names),
        plan.dim,
        width,
        plan.eviction,
        plan.limits,
        plan.device,
        plan.initial_capacity,
        plan.remember_evicted,
    )
    capacity = shape.max_rows(plan.max_capacity, *free_memory(plan.device))
    what = "this table" if len(plan.names) == 1 else f"each of these {len(plan.names)} tables"
    if capacity < plan.initial_capacity:
        raise ValueError(
            f"init_capacity is {plan.initial_capacity:,}, but the free or allowed memory holds "
            f"{capacity:,} rows of {plan.dim} columns with their optimizer states in {what}."
        )
    if capacity < plan.max_capacity:
        warn(
            f"max_capacity is {plan.max_capacity:,}, but the free or allowed memory holds "
            f"{capacity:,} rows of {plan.dim} columns with their optimizer states in {what}: it "
            "evicts from there on."
        )
    specs = [
        TableSpec(
            name=name,
            capacity=capacity,
            dim=plan.dim,
            eviction=plan.eviction,
            hbm_bytes=shape.hbm_bytes(capacity),
            seed=plan.seed,
            initializer=plan.initializer,
            initial_capacity=plan.initial_capacity,
            remember_evicted=plan.remember_evicted,
        )
        for name in plan.names
    ]
    group = TableGroup(specs, list(range(len(specs))), plan.optimizer, device=plan.device)
    return group, capacity
