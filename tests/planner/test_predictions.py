"""Steps of tables that no calibration measured are predicted from measured ones.

The timer is simulated: the time of a unit of work is known, and each measurement is up to 5 % off.
"""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology

from tests.support.shards import table_shard
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.backends import registry
from torchrec_hkv.backends.constants import FIXED, TimedStep, fit_constants
from torchrec_hkv.backends.workload import StepTime, Workload
from torchrec_hkv.planner import Calibration

#: Milliseconds per unit of work; bytes and operations are matched by the prefixes of their names.
_FORWARD = {"ids": 1e-7, "distinct": 4e-7, "id_bytes": 2e-10, "bag_bytes": 4e-10}
_FORWARD |= {"row_bytes": 5e-10, "new": 2e-6, "moved_bytes": 2e-8, "tables": 4e-3}
_FORWARD |= {"prefix_bytes": 3e-10, "flop": 3e-11, FIXED: 0.03}
_BACKWARD = {**{name: 2 * cost for name, cost in _FORWARD.items()}, "core_bytes": 1e-9}


def _took(costs, work):
    known = {name: cost for name, cost in costs.items() if name != FIXED}
    return sum(
        known[name if name in known else name.split("_rank_")[0]] * count
        for name, count in work.items()
    )


def _step(work, count=1):
    """A step of ``count`` equal tables in a group."""
    return StepTime(
        _FORWARD[FIXED] + count * _took(_FORWARD, work.forward),
        _BACKWARD[FIXED] + count * _took(_BACKWARD, work.backward),
    )


def _distinct(ids, rows):
    return rows * -torch.expm1(ids * torch.log1p(torch.tensor(-1 / rows).double())).item()


def _calibration(name, device_type, seed):
    generator, samples = torch.Generator().manual_seed(seed), []
    backend = registry.get(name)
    for case in backend.calibration_cases(device_type):
        shard = table_shard(case.capacity, case.dim, case.options)
        for batch in case.batches:
            ids = batch.bags * batch.ids_per_bag
            load = Workload(ids, _distinct(ids, case.rows ** (1 / batch.skew)), batch.bags)
            work = backend.work(shard, case.optimizer, load, device_type)
            true = _step(work, case.tables)
            off = (0.95 + 0.1 * torch.rand(2, generator=generator)).tolist()
            elapsed = StepTime(true.forward * off[0], true.backward * off[1])
            samples.append(TimedStep(work.times(case.tables), elapsed, case.size))
    constants = {name: fit_constants(samples)}
    return Calibration(device_type, "made up", 1, {}, constants)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["hkv", "tt"])
@pytest.mark.parametrize("dim", [32, 128])
def test_other_tables_and_batches(name, device_type, dim):
    tables, rows = 4, 10_000_000
    batch = 8192 if device_type == "cuda" else 512
    configs = [
        EmbeddingBagConfig(
            name=f"t{t}", feature_names=[f"f{t}"], embedding_dim=dim, num_embeddings=rows
        )
        for t in range(tables)
    ]
    for bag in (1, 8):
        constraint = ParameterConstraints(
            compute_kernels=[name],
            sharding_types=["table_wise"],
            pooling_factors=[float(bag)],
            options=TTOptions(ranks=32) if name == "tt" else None,
        )
        for seed in range(5):
            planner = EmbeddingShardingPlanner(
                topology=Topology(1, device_type, hbm_cap=1 << 40, ddr_cap=1 << 42),
                batch_size=batch,
                constraints={config.name: constraint for config in configs},
                calibration=_calibration(name, device_type, seed),
            )
            model = EmbeddingBagCollection(configs, device=torch.device("meta"))
            report = planner.plan(model, get_default_sharders()).plan[""]
            predicted = report.step_times(0)
            shard = table_shard(rows, dim, constraint.options or registry.get(name).options_type())
            ids = batch * bag
            load = Workload(ids, _distinct(ids, rows), batch)
            # TorchRec's default optimizer is SGD.
            true = _step(registry.get(name).work(shard, None, load, device_type), tables)
            assert predicted["forward"] == pytest.approx(true.forward, rel=0.05)
            assert predicted["backward"] == pytest.approx(true.backward, rel=0.05)
