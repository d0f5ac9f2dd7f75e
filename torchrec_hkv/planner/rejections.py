"""Explains why the planner did not choose other kernels that a table's constraint allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchrec.distributed.planner.types import ShardingOption

from torchrec_hkv.planner.missing_memory import MissingMemory
from torchrec_hkv.planner.options import kernel_of


def why_rejected(
    chosen: ShardingOption,
    plan: Sequence[ShardingOption],
    options: Sequence[ShardingOption],
    refused: Mapping[str, str],
    missing: Callable[[list[ShardingOption]], MissingMemory],
    rating: Callable[[list[ShardingOption]], float | None],
    best: float,
    loses_more: Callable[[ShardingOption, ShardingOption], bool],
    are_many: bool,
) -> dict[str, str]:
    """For each kernel that could serve a table, the reason why it was not chosen. If there is only
    one kernel, the reason why it was not chosen with larger sizes that lose less quality.

    To find the reason, the table's options are put in the plan in place of the chosen one.

    Args:
        chosen: the table's option in the plan.
        plan: the options of all tables.
        options: the table's options for all kernels.
        refused: kernels that can't serve the table, with the reason.
        missing: returns the memory that a plan lacks.
        rating: returns a plan's step time on the slowest rank; None if the plan does not fit.
        best: the plan's step time.
        loses_more: whether the first option is ruled out because it loses more quality than the
            second.
        are_many: whether many tables are examined, so that only two options of each kernel are
            tried.
    """
    reasons = dict(refused)
    others = [option for option in plan if option is not chosen]
    for kernel in dict.fromkeys(map(kernel_of, options)):
        if kernel != kernel_of(chosen):
            of_kernel = [option for option in options if kernel_of(option) == kernel]
            if all(loses_more(option, chosen) for option in of_kernel):
                reasons[kernel] = "it would lose more quality"
                continue
            of_kernel = [option for option in of_kernel if not loses_more(option, chosen)]
            of_kernel = _notable(of_kernel) if are_many else of_kernel
            reasons[kernel] = _reason(of_kernel, others, best, missing, rating)
    with_more_loss = [option for option in options if loses_more(chosen, option)]
    if with_more_loss and not reasons:  # a single kernel, with a choice of sizes
        name = f"{kernel_of(chosen)} without loss"
        reasons[name] = _reason(with_more_loss, others, best, missing, rating)
    return reasons


def _reason(
    options: Sequence[ShardingOption],
    others: Sequence[ShardingOption],
    best: float,
    missing: Callable[[list[ShardingOption]], MissingMemory],
    rating: Callable[[list[ShardingOption]], float | None],
) -> str:
    ratings = [
        took for option in options if (took := _rated([*others, option], rating)) is not None
    ]
    if ratings:
        return (
            f"the slowest rank's tables would take {_ms(min(ratings))} a step instead of "
            f"{_ms(best)}"
        )
    minimum = min(
        (missing([*others, option]) for option in options),
        key=lambda lacks: lacks.hbm + lacks.host,
    )
    return (
        f"it does not fit: {minimum} are missing" if minimum else "it fits no arrangement on ranks"
    )


def _rated(
    proposal: list[ShardingOption], rating: Callable[[list[ShardingOption]], float | None]
) -> float | None:
    """Rates a plan without changing the ranks of its shards."""
    shards = [shard for option in proposal for shard in option.shards]
    ranks = [shard.rank for shard in shards]
    try:
        return rating(proposal)
    finally:
        for shard, rank in zip(shards, ranks, strict=True):
            shard.rank = rank


def _notable(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """The fastest option, and the one whose largest shard takes the least memory."""

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
