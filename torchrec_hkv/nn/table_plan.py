"""The properties of a module's tables, and how they become a group that fits in memory."""

from __future__ import annotations

import dataclasses

import torch

from torchrec_hkv.hash_table import EvictionPolicy, Initializer, Optimizer, TableGroup, TableSpec
from torchrec_hkv.nn.capacity import HbmLimits, TableShape, free_memory
from torchrec_hkv.nn.warn import warn


@dataclasses.dataclass(frozen=True)
class Plan:
    """The properties of a module's tables.

    Attributes:
        names: names of the tables; mixed into the seed of initial rows.
        dim: number of columns of their rows.
        max_capacity: maximal number of rows of each.
        initial_capacity: number of rows that each has memory for at first.
        eviction: the eviction policy.
        limits: limits of each table in HBM.
        gradient_bytes: maximal memory of stored gradients.
        seed: seed of initial rows.
        initializer: initializer of initial rows.
        optimizer: the optimizer that trains them.
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


def make_group(plan: Plan) -> tuple[TableGroup, int]:
    """A group, and the capacity of its tables."""
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
    capacity = shape.most_rows(plan.max_capacity, *free_memory(plan.device))
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
