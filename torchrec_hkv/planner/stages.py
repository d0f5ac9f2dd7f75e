"""What TorchRec's own code takes in the parts of a step, whatever is looked up.

The exchange of ids is the host's work for the most part, and has constants of its own by whether
rows of a table are spread over ranks and whether backends serve tables (:func:`input_dist_of`). How
the constants are measured: :mod:`torchrec_hkv.planner.stage_timing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torchrec.distributed.types import ShardingType

#: Parts of a step of a sharded collection.
STAGES = ("input_dist", "forward", "output_dist", "backward")
#: The exchanges of ids: by whether backends serve tables, and whether tables stay whole.
INPUT_DISTS = {
    (False, False): "input_dist",
    (False, True): "input_dist_by_table",
    (True, False): "input_dist_of_backends",
    (True, True): "input_dist_of_backends_by_table",
}
#: Sharding types whose ids go to the rank of a table or column, which no id decides.
_BY_TABLE = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
)

#: Milliseconds by stage: once (``fixed``), and for a feature; of exchanges of ids also for a bag
#: and an id of a rank's batch.
StageTimes = dict[str, dict[str, float]]


def input_dist_of(sharding_type: str, has_backends: bool) -> str | None:
    """Which exchange of :data:`INPUT_DISTS` tables of a sharding type have; None where there is
    none, as each rank has all rows.

    Args:
        sharding_type: TorchRec's.
        has_backends: whether backends serve tables of this type. All tables of the type then use
            :class:`torchrec_hkv.sharding.dists.all_to_all.CountedAllToAll`.
    """
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return None
    return INPUT_DISTS[has_backends, sharding_type in _BY_TABLE]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of ids of a step: that of all tables of a sharding type.

    Attributes:
        name: one of :data:`INPUT_DISTS`.
        features: that look the tables up.
        bags: of a rank's batch.
        ids: in them.
    """

    name: str
    features: float
    bags: float
    ids: float


def step_parts(
    stages: StageTimes, features: int, exchanges: Iterable[Exchange]
) -> dict[str, float]:
    """Milliseconds that TorchRec's own code takes in the parts of a step.

    Args:
        stages: as a calibration has them for a number of ranks; empty for zeros.
        features: of the collection.
        exchanges: of ids.
    """
    counts = {"fixed": 1.0, "feature": float(features)}
    times = {stage: _took(stages.get(stage, {}), counts) for stage in STAGES[1:]}
    took = 0.0
    for exchange in exchanges:
        counts = {
            "fixed": 1.0,
            "feature": exchange.features,
            "bag": exchange.bags,
            "id": exchange.ids,
        }
        took += _took(stages.get(exchange.name, stages.get(STAGES[0], {})), counts)
    return {STAGES[0]: took, **times}


def _took(costs: Mapping[str, float], counts: Mapping[str, float]) -> float:
    return sum(cost * counts[name] for name, cost in costs.items())
