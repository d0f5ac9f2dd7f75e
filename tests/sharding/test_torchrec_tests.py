"""TorchRec's own model-parallel tests pass with dense-compatible tables on ``hkv``."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.pairwise import pairwise
from tests.support.torchrec_tests import (
    TorchRecScenario,
    run_torchrec_state_test,
    run_torchrec_test,
)

pytestmark = pytest.mark.compat

TYPES = [
    "row_wise",
    "table_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
]

VARIANTS = {
    "sum": {},
    "mean": {"is_mean": True},
    "narrow": {"narrow": True},
    "in_backward": {"in_backward": True},
    "variable_per_rank": {"variable_per_rank": True},
}

#: Types that sum outputs over ranks, which gloo can't do for batches of different sizes.
BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")

#: Processes, and processes per host.
RANKS = [(1, 1), (2, 2), (4, 2)]


def gloo_has(variant: str, sharding_type: str, ranks: tuple[int, int]) -> bool:
    return not (variant == "variable_per_rank" and sharding_type in BY_ROWS and ranks[0] > 1)


CASES = pairwise(VARIANTS, TYPES, RANKS, allowed=gloo_has)
CASES += [(v, t, r) for v in VARIANTS for t in TYPES for r in RANKS if not gloo_has(v, t, r)]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "sharding_type", "ranks"), CASES)
def test_a_training_step(run_ranks, device_type, variant, sharding_type, ranks):
    scenario = dataclasses.replace(TorchRecScenario(sharding_type), **VARIANTS[variant])
    if device_type == "cpu" and not gloo_has(variant, sharding_type, ranks):
        pytest.skip("gloo refuses TorchRec's uneven reduce_scatter, for stock tables too")
    world_size, host_size = ranks
    run_ranks(world_size, run_torchrec_test, host_size, scenario, host_size=host_size)


@pytest.mark.slow
@pytest.mark.parametrize("sharding_type", TYPES[:5])
@pytest.mark.parametrize("optimizer", [False, True])
def test_states(run_ranks, sharding_type, optimizer):
    run_ranks(1, run_torchrec_state_test, sharding_type, optimizer)


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "table_column_wise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_sizes_of_features(run_ranks, sharding_type, world_size):
    scenario = TorchRecScenario(sharding_type, variable_per_feature=True)
    run_ranks(world_size, run_torchrec_test, world_size, scenario)
