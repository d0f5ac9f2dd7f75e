"""Time of TorchRec's own code in the stages of a step, apart from lookups.

The input distribution is mostly host work. Its constants depend on whether tables are row-wise
sharded and whether backends serve tables (:func:`input_dist_of`).
:mod:`torchrec_hkv.planner.stage_timing` measures the constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torchrec.distributed.types import ShardingType

#: Stages of a step of a sharded collection.
STAGES = ("input_dist", "forward", "output_dist", "backward")
#: Input distributions by (whether backends serve tables, whether each table is on one rank).
INPUT_DISTS = {
    (False, False): "input_dist",
    (False, True): "input_dist_by_table",
    (True, False): "input_dist_of_backends",
    (True, True): "input_dist_of_backends_by_table",
}
#: Sharding types that send ids to the rank of a table or column, for any id.
_BY_TABLE = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
)

#: Milliseconds by stage: constant (``fixed``) and for each feature; for input distributions also
#: for each bag and id of a rank's batch.
StageTimes = dict[str, dict[str, float]]


def input_dist_of(sharding_type: str, has_backends: bool) -> str | None:
    """The name in :data:`INPUT_DISTS` for a sharding type; None for data-parallel tables, whose ids
    are not sent.

    Args:
        sharding_type: TorchRec's sharding type.
        has_backends: whether backends serve tables of this type. All tables of the type then use
            :class:`torchrec_hkv.sharding.dists.all_to_all.CountedAllToAll`.
    """
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return None
    return INPUT_DISTS[has_backends, sharding_type in _BY_TABLE]


@dataclasses.dataclass(frozen=True)
class IdExchange:
    """One input distribution of a step: that of all tables of a sharding type.

    Attributes:
        name: a name in :data:`INPUT_DISTS`.
        features: number of features that look the tables up.
        bags: number of bags in a rank's batch.
        ids: number of ids in these bags.
    """

    name: str
    features: float
    bags: float
    ids: float


def step_parts(
    stages: StageTimes, features: int, exchanges: Iterable[IdExchange]
) -> dict[str, float]:
    """Milliseconds of TorchRec's own code in the stages of a step.

    Args:
        stages: times from a calibration, for a number of ranks; empty for zeros.
        features: number of features of the collection.
        exchanges: the input distributions.
    """
    counts = {"fixed": 1.0, "feature": float(features)}
    times = {stage: _stage_time(stages.get(stage, {}), counts) for stage in STAGES[1:]}
    exchange_time = 0.0
    for exchange in exchanges:
        counts = {
            "fixed": 1.0,
            "feature": exchange.features,
            "bag": exchange.bags,
            "id": exchange.ids,
        }
        exchange_time += _stage_time(stages.get(exchange.name, stages.get(STAGES[0], {})), counts)
    return {STAGES[0]: exchange_time, **times}


def _stage_time(costs: Mapping[str, float], counts: Mapping[str, float]) -> float:
    return sum(cost * counts[name] for name, cost in costs.items())
