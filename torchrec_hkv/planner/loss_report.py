"""Reports on tables that lose quality: how much, why, and what more memory would change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_hkv.planner.enumerator import BackendEnumerator
from torchrec_hkv.planner.least_loss import LeastLoss
from torchrec_hkv.planner.losses import TableLoss
from torchrec_hkv.planner.options import kernel_of
from torchrec_hkv.planner.report import LossReport, format_bytes

_GIB = 1 << 30
Key = tuple[str, str]


def loss_reports(
    plan: Sequence[ShardingOption],
    enumerator: BackendEnumerator,
    least_loss: LeastLoss,
    space: list[ShardingOption],
    rejected: Mapping[Key, Mapping[str, str]],
    topology: Topology,
) -> dict[Key, LossReport]:
    """Reports on the tables with loss, by path and table.

    Args:
        plan: the options of all tables.
        enumerator: the planner's enumerator.
        least_loss: the planner's search.
        space: the enumerated options.
        rejected: the reasons why other kernels were not chosen.
        topology: topology with the memory available for tables.
    """
    losses = {(o.path, o.name): (o, enumerator.loss(o)) for o in plan}
    lossy = {key: pair for key, pair in losses.items() if pair[1].is_lossy}
    if not lossy:
        return {}
    memory = "host memory" if topology.compute_device == "cpu" else "HBM"
    wider: dict[Key, ShardingOption] = {}
    if any(rejected.get(key) for key in lossy):
        found = least_loss.with_more(space, _GIB, plan)
        wider = {} if found is None else {(o.path, o.name): o for o in found.options}
    return {
        key: LossReport(
            value=loss.value,
            what=str(loss),
            why=_reason(rejected.get(key, {}), least_loss),
            more=_more(option, loss, wider.get(key), enumerator, memory),
            left=_remaining_memory(option, plan, topology),
            own_curves=enumerator.has_own_curves(option),
        )
        for key, (option, loss) in lossy.items()
    }


def _reason(rejected: Mapping[str, str], least_loss: LeastLoss) -> str:
    reasons = [
        f"{kernel}: {reason}"
        for kernel, reason in rejected.items()
        if "would lose more" not in reason
    ]
    if not reasons:
        return "its constraint names nothing that loses less"
    if least_loss.is_traded and any("would take" in reason for reason in reasons):
        return f"max_quality_loss allows it for time ({'; '.join(reasons)})"
    return "; ".join(reasons)


def _more(
    option: ShardingOption,
    loss: TableLoss,
    wider: ShardingOption | None,
    enumerator: BackendEnumerator,
    memory: str,
) -> str:
    """The effect of one more GiB, spread over the ranks."""
    if wider is None:
        return ""
    then, begin = enumerator.loss(wider), f"1 GiB more {memory} over all ranks would "
    if not then.is_lossy:
        return f"{begin}keep it whole on {kernel_of(wider)}"
    if then.value < loss.value:
        return f"{begin}lower that to {then.value:.4f} ({kernel_of(wider)}: {then})"
    return f"{begin}change nothing" if then == loss else f"{begin}serve other tables"


def _remaining_memory(
    option: ShardingOption, plan: Sequence[ShardingOption], topology: Topology
) -> str:
    """Free memory of the fullest rank of a table."""
    ranks = {shard.rank for shard in option.shards if shard.rank is not None}
    on_host = topology.compute_device == "cpu"
    free = {
        device.rank: device.storage.ddr if on_host else device.storage.hbm
        for device in topology.devices
        if device.rank in ranks
    }
    for other in plan:
        for shard in other.shards:
            if shard.rank in free and shard.storage is not None:
                free[shard.rank] -= shard.storage.ddr if on_host else shard.storage.hbm
    return format_bytes(max(min(free.values(), default=0), 0))
