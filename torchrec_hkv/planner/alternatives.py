"""Why the planner did not give a table another of the kernels that its constraint names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import (
    Partitioner,
    PerfModel,
    PlannerError,
    ShardingOption,
    Topology,
)

from torchrec_hkv.planner.budget import missing_bytes
from torchrec_hkv.planner.options import kernel_of


def why_rejected(
    chosen: ShardingOption,
    plan: Sequence[ShardingOption],
    options: Sequence[ShardingOption],
    refused: Mapping[str, str],
    topology: Topology,
    partitioner: Partitioner,
    perf_model: PerfModel,
) -> dict[str, str]:
    """For each kernel that could have served a table, why it does not.

    Every one of its options is put in the place of the chosen one, the rest of the plan as it is.

    Args:
        chosen: the table's option in the plan.
        plan: the options of all tables.
        options: of the table, of all kernels.
        refused: kernels that can't serve the table, and why.
        topology: of the ranks, with what they have for tables.
        partitioner: the planner's.
        perf_model: the planner's.
    """
    reasons = dict(refused)
    others = [option for option in plan if option is not chosen]
    best = perf_model.rate(list(plan))
    for kernel in dict.fromkeys(map(kernel_of, options)):
        if kernel != kernel_of(chosen):
            own = [option for option in options if kernel_of(option) == kernel]
            reasons[kernel] = _reason(own, others, best, topology, partitioner, perf_model)
    return reasons


def _reason(
    options: Sequence[ShardingOption],
    others: Sequence[ShardingOption],
    best: float,
    topology: Topology,
    partitioner: Partitioner,
    perf_model: PerfModel,
) -> str:
    ratings: list[float] = []
    for option in options:
        proposal = copy.deepcopy([*others, option])
        for part in proposal:
            for shard in part.shards:
                shard.rank = None
        try:
            plan = partitioner.partition(proposal=proposal, storage_constraint=topology)
        except PlannerError:
            continue
        ratings.append(perf_model.rate(plan))
    if ratings:
        return (
            f"the slowest rank's tables would take {_ms(min(ratings))} a step, as planned they "
            f"take {_ms(best)}"
        )
    least = min(
        (missing_bytes([*others, option], topology) for option in options),
        key=lambda missing: missing.hbm + missing.host,
    )
    return f"it does not fit: {least} are missing" if least else "it fits no arrangement on ranks"


def _ms(time: float) -> str:
    return f"{time:.3g} ms"
