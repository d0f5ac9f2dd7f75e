"""The planner first uses host memory; then as few tables as possible lose quality, and no more than
they must."""

from __future__ import annotations

import functools

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.optim import RowWiseAdagrad

from tests.support.models import make_model
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.planner import IdFrequencies

pytestmark = pytest.mark.compat

_MIB = 1 << 20
_ROWS = {"user": 2_000_000, "item": 500_000, "page": 4_000_000}
_DIM = 64


@functools.cache
def _model():
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=_DIM, feature_names=[n])
        for n, rows in _ROWS.items()
    ]
    return make_model(tables, RowWiseAdagrad, {"lr": 0.1})


def _plan(hbm, host=0, gpus=4, kernels=("fused", "hkv", "tt"), constraints=None, **kwargs):
    constraint = ParameterConstraints(compute_kernels=list(kernels))
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=gpus,
            local_world_size=gpus,
            compute_device="cuda",
            hbm_cap=hbm,
            ddr_cap=max(host, 1),  # TorchRec 1.6 treats 0 as its default
        ),
        constraints={**dict.fromkeys(_ROWS, constraint), **(constraints or {})},
        storage_reservation=FixedPercentageStorageReservation(0.0),
        **kwargs,
    )
    return planner.plan(_model(), get_default_sharders())


def _reports(plan):
    return plan.plan["ebc"].reports


def _kernels(plan):
    return {name: report.kernel for name, report in _reports(plan).items()}


def _lossy(plan):
    return {name for name, report in _reports(plan).items() if report.loss is not None}


def test_with_room_for_all_nothing_is_lost():
    plan = _plan(1 << 30)
    assert set(_kernels(plan).values()) <= {"fused", "hkv"}
    assert _lossy(plan) == set()
    assert "loses" not in str(plan)


def test_only_one_table_is_compressed_where_the_others_fit():
    plan = _plan(330 * _MIB)
    kernels = _kernels(plan)
    assert sorted(kernels.values()) == ["fused", "fused", "tt"]
    (name,) = _lossy(plan)
    assert kernels[name] == "tt"
    # With ranks of 32 the table took 4 to 5 MiB.
    assert sum(part.hbm for part in _reports(plan)[name].bytes) > 50 * _MIB


def test_the_largest_ranks_that_fit():
    plan = _plan(330 * _MIB)
    (name,) = _lossy(plan)
    ranks = plan.plan["ebc"][name].options.ranks
    assert ranks < 256
    stays = {
        other: ParameterConstraints(compute_kernels=["fused"]) for other in _ROWS if other != name
    }

    def fixed(rank):
        return ParameterConstraints(compute_kernels=["tt"], options=TTOptions(ranks=rank))

    again = _plan(330 * _MIB, constraints={**stays, name: fixed(ranks)})
    assert _lossy(again) == {name}
    with pytest.raises(Exception, match=r"insufficient storage|constraints"):
        _plan(330 * _MIB, constraints={**stays, name: fixed(ranks + 4)})


def test_little_memory_is_used_for_ranks():
    plan = _plan(60 * _MIB)
    lossy = _lossy(plan)
    assert lossy == {"user", "page"}
    for name in lossy:
        report = _reports(plan)[name]
        (rank,) = report.ranks
        step = plan.plan["ebc"][name].options
        more = TTOptions(ranks=step.ranks + 4).shape(_ROWS[name], _DIM)
        minimum = TTOptions(ranks=step.ranks).shape(_ROWS[name], _DIM)
        # Cores and their gradient; states of slices take less than that.
        grown = 2 * 4 * (more.num_elements - minimum.num_elements)
        assert plan.memory[rank].hbm.free < 1.1 * grown


def test_host_memory_comes_before_a_loss():
    plan = _plan(330 * _MIB, host=4 << 30)
    assert _lossy(plan) == set()
    report = _reports(plan)["page"]
    assert report.kernel == "hkv"
    assert sum(part.host for part in report.bytes) >= 4 * _DIM * _ROWS["page"]
    # The plan uses the available HBM for rows.
    minimum = plan.memory[0].hbm
    assert minimum.free < minimum.budget / 8


def test_host_memory_is_used_where_options_of_the_user_name_it():
    options = [HKVOptions(), HKVOptions(hbm_bytes="index"), TTOptions()]
    page = ParameterConstraints(compute_kernels=["hkv", "tt"], options=options)
    plan = _plan(330 * _MIB, host=4 << 30, constraints={"page": page})
    assert _lossy(plan) == set()
    assert plan.plan["ebc"]["page"].options.hbm_bytes == "index"
    plan = _plan(330 * _MIB, host=0, constraints={"page": page})
    assert _lossy(plan) == {"page"}
    assert _kernels(plan)["page"] == "tt"


def test_a_table_of_one_kernel_keeps_its_default_ranks():
    page = ParameterConstraints(compute_kernels=["tt"])
    plan = _plan(1 << 30, constraints={"page": page})
    assert plan.plan["ebc"]["page"].options == TTOptions()
    loss = _reports(plan)["page"].loss
    assert loss.value > 0.08
    assert loss.why == "its constraint names nothing that loses less"
    assert loss.more == ""


def _power_law(ids):
    return IdFrequencies.of_counts(1e9 / torch.arange(1, ids + 1, dtype=torch.float64))


@pytest.mark.slow
def test_fewer_rows_where_the_histogram_says_that_few_ids_have_most_lookups():
    page = ParameterConstraints(
        compute_kernels=["fused", "hkv"], frequencies=_power_law(_ROWS["page"])
    )
    plan = _plan(330 * _MIB, constraints={"page": page})
    assert _lossy(plan) == {"page"}
    capacity = plan.plan["ebc"]["page"].options.capacity
    report = _reports(plan)["page"]
    assert sum(report.rows) == capacity
    assert 0.5 * _ROWS["page"] < capacity < _ROWS["page"]
    assert f"{capacity:,} rows for 4,000,000 ids have 9" in report.loss.what
    # A table with 3 % more rows would not fit.
    more = ParameterConstraints(
        compute_kernels=["hkv"], options=HKVOptions(capacity=int(capacity * 1.035))
    )
    stays = ParameterConstraints(compute_kernels=["fused"])
    with pytest.raises(Exception, match=r"insufficient storage|constraints"):
        _plan(330 * _MIB, constraints={"page": more, "user": stays, "item": stays})


@pytest.mark.slow
def test_a_capacity_below_the_number_of_ids_is_a_loss_that_the_user_chose():
    constraint = ParameterConstraints(compute_kernels=["hkv"], frequencies=_power_law(8_000_000))
    plan = _plan(4 << 30, constraints={"page": constraint})
    assert _lossy(plan) == {"page"}
    assert "4,000,000 rows for 8,000,000 ids" in _reports(plan)["page"].loss.what


def test_rows_of_16_bits_come_after_rows_of_32():
    options = [HKVOptions(), HKVOptions(row_dtype=torch.float16)]
    page = ParameterConstraints(compute_kernels=["hkv"], options=options)
    roomy = _plan(1 << 30, constraints={"page": page})
    assert roomy.plan["ebc"]["page"].options == options[0]
    tight = _plan(330 * _MIB, constraints={"page": page})
    assert tight.plan["ebc"]["page"].options == options[1]
    assert _lossy(tight) == {"page"}
    assert "rows are float16, and float32 in the config" in " ".join(str(tight).split())


@pytest.mark.slow
def test_the_report_says_what_is_lost_why_and_what_more_memory_buys():
    plan = _plan(60 * _MIB)
    report = _reports(plan)["page"]
    line = f"page {report.loss}"
    assert line in " ".join(str(plan).split())
    shape = plan.plan["ebc"]["page"].options.shape(_ROWS["page"], _DIM)
    share = shape.num_elements / (_ROWS["page"] * _DIM)
    assert f"an estimated {report.loss.value:.4f} of AUC" in line
    assert f"keep {share:.2%} of bytes" in line
    assert "fused: it does not fit: " in line
    assert "1 GiB more HBM over all ranks would lower that to 0.0" in line
    assert "of the budget is left on its fullest rank" in line
    assert "1 GiB more HBM over all ranks would keep it whole on fused" in (
        _reports(plan)["user"].loss.more
    )
    # A plan with that much memory confirms it.
    wider = _plan(60 * _MIB + (1 << 28))
    assert _kernels(wider)["user"] == "fused"
    lower = _reports(wider)["page"].loss.value
    assert f"would lower that to {lower:.4f} (tt: {_reports(wider)['page'].loss.what})" in line


def test_a_histogram_of_few_ids_makes_a_compressed_table_lose_less():
    def loss(frequencies):
        page = ParameterConstraints(compute_kernels=["tt"], frequencies=frequencies)
        return _reports(_plan(1 << 30, constraints={"page": page}))["page"].loss.value

    few = IdFrequencies.of_counts(torch.ones(100_000))
    assert loss(few) < loss(None)
