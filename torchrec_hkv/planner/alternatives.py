"""Why the planner did not give a table another of the kernels that its constraint names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    loses_more: Callable[[ShardingOption, ShardingOption], bool],
    are_many: bool,
) -> dict[str, str]:
    """For each kernel that could have served a table, why it does not; for the only one, why not in
    larger sizes, where these would lose less.

    Its options are put in the place of the chosen one, the rest of the plan as it is.

    Args:
        chosen: the table's option in the plan.
        plan: the options of all tables.
        options: of the table, of all kernels.
        refused: kernels that can't serve the table, and why.
        topology: of the ranks, with what they have for tables.
        partitioner: the planner's.
        perf_model: the planner's.
        loses_more: whether the first option loses more than the second and is no choice for that.
        are_many: whether so many tables are asked about that two options of each kernel must do.
    """
    reasons = dict(refused)
    others = [option for option in plan if option is not chosen]
    best = perf_model.rate(list(plan))
    for kernel in dict.fromkeys(map(kernel_of, options)):
        if kernel != kernel_of(chosen):
            own = [option for option in options if kernel_of(option) == kernel]
            if all(loses_more(option, chosen) for option in own):
                reasons[kernel] = "it would lose more quality"
                continue
            own = [option for option in own if not loses_more(option, chosen)]
            own = _notable(own) if are_many else own
            reasons[kernel] = _reason(own, others, best, topology, partitioner, perf_model)
    whole = [option for option in options if loses_more(chosen, option)]
    if whole and not reasons:  # one kernel, of which sizes were chosen
        name = f"{kernel_of(chosen)} without loss"
        reasons[name] = _reason(whole, others, best, topology, partitioner, perf_model)
    return reasons


def _reason(
    options: Sequence[ShardingOption],
    others: Sequence[ShardingOption],
    best: float,
    topology: Topology,
    partitioner: Partitioner,
    perf_model: PerfModel,
) -> str:
    ratings = [
        rating
        for option in options
        if (rating := _rating([*others, option], topology, partitioner, perf_model)) is not None
    ]
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


def _rating(
    proposal: list[ShardingOption],
    topology: Topology,
    partitioner: Partitioner,
    perf_model: PerfModel,
) -> float | None:
    """What a step of the slowest rank takes; None where the options fit no arrangement."""
    shards = [shard for option in proposal for shard in option.shards]
    ranks = [shard.rank for shard in shards]
    for shard in shards:
        shard.rank = None
    try:
        return perf_model.rate(
            partitioner.partition(proposal=proposal, storage_constraint=topology)
        )
    except PlannerError:
        return None
    finally:
        for shard, rank in zip(shards, ranks, strict=True):
            shard.rank = rank


def _notable(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """The fastest one, and the one that takes least memory of a rank."""

    def slowest(option: ShardingOption) -> float:
        return max(shard.perf.total for shard in option.shards if shard.perf is not None)

    def largest(option: ShardingOption) -> int:
        return max(
            shard.storage.hbm + shard.storage.ddr
            for shard in option.shards
            if shard.storage is not None
        )

    return list({id(o): o for o in (min(options, key=slowest), min(options, key=largest))}.values())


def _ms(time: float) -> str:
    return f"{time:.3g} ms"
