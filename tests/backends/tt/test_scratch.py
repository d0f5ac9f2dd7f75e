"""Planned scratch memory of a Tensor-Train step agrees with what a run takes."""

from __future__ import annotations

import ctypes
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torchrec import EmbeddingBagConfig

from tests.support import tensor_train as tt
from tests.support.gpu import needs_gpu
from tests.support.models import make_model, topology
from tests.support.processes import fork_context
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, TTOptions, backends
from torchrec_hkv.backends import OptimizerSpec
from torchrec_hkv.backends.tt.cost import tt_scratch
from torchrec_hkv.backends.workload import Workload
from torchrec_hkv.compat import stock_table_bytes
from torchrec_hkv.planner.options import is_backend_option, shards_of
from torchrec_hkv.sharding.modules.sharders import get_default_sharders
from torchrec_hkv.tensor_train import TTGroup, TTShape, make_shape

SHAPE = TTShape(3500, 64, (14, 25, 10), (4, 4, 4), (32, 32))
LARGE = make_shape(4_000_000, 64, ranks=8)


def _load(ids, distinct=None):
    return Workload(ids=ids, distinct=ids if distinct is None else distinct, bags=ids / 4)


@pytest.mark.parametrize("planned_for", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("sharding_type", "stock"), [("table_wise", "fused"), ("data_parallel", "dense")]
)
def test_the_planner_counts_it(planned_for, sharding_type, stock):
    rows, batch, length = 100_000, 1024, 8
    table = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=16, feature_names=["f"])
    constraint = ParameterConstraints(
        compute_kernels=["tt", stock],
        sharding_types=[sharding_type],
        pooling_factors=[float(length)],
    )
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device(planned_for)),
        constraints={"t": constraint},
        batch_size=batch,
    )
    model = make_model([table], torch.optim.SGD, {"lr": 0.1})
    options = planner._enumerator.enumerate(model, get_default_sharders())
    (backend_option,) = [option for option in options if is_backend_option(option)]
    (stock_option,) = [option for option in options if not is_backend_option(option)]
    # A data-parallel table gets its own rank's ids, other tables those of both ranks.
    replicated = sharding_type == "data_parallel"
    ids = batch * length * (1 if replicated else 2)
    distinct = rows * (1 - (1 - 1 / rows) ** ids)
    shape = TTOptions().shape(rows, 16)
    scratch = tt_scratch(shape, _load(ids, distinct), planned_for, False, replicated)
    assert scratch > 8 * ids
    for mine, stocks, counted, shard in zip(
        backend_option.shards,
        stock_option.shards,
        stock_table_bytes(stock_option),
        shards_of(backend_option),
        strict=True,
    ):
        taken = backends.get("tt").storage(shard, OptimizerSpec("sgd"), planned_for)
        if planned_for == "cuda":
            of_ours, of_stock, table_bytes = mine.storage.hbm, stocks.storage.hbm, taken.hbm
        else:
            of_ours, of_stock, table_bytes = mine.storage.ddr, stocks.storage.ddr, taken.host
        # TorchRec counts ids and outputs.
        assert of_ours == table_bytes + scratch + of_stock - counted


def test_the_tensor_that_replicas_average():
    shapes = [SHAPE, TTShape(50, 4, (5, 10), (2, 2), (3,))]
    cores = [core for shape in shapes for core in tt.random_cores(shape)]
    bags = tt.random_bags(shapes, [0, 1], 4)
    flat = TTGroup(shapes).flat_gradients(cores, torch.randn(4, 68), bags.ids, bags.offsets, 4)
    load = _load(0)
    planned = [
        tt_scratch(shape, load, "cpu", False, True) - tt_scratch(shape, load, "cpu", False, False)
        for shape in shapes
    ]
    assert sum(planned) == flat.nbytes


def _peak(step, small_step):
    """The process's peak memory during a step, less its memory after a small step."""
    small_step()  # starts threads
    # Otherwise the step would reuse free heap memory, and the peak would not show it.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak

    def field(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    before = field("VmRSS")
    step()
    return field("VmHWM") - before


def _peak_of_lookup(n):
    ids = torch.randperm(4_000_000)[:n]
    group, cores = TTGroup([LARGE]), tt.random_cores(LARGE)

    def lookup(n):
        group.lookup(cores, ids[:n], torch.arange(0, n + 1, 4), n // 4)

    return _peak(lambda: lookup(n), lambda: lookup(400))


@pytest.mark.slow
def test_a_run_on_a_cpu():
    n = 400_000
    # A new process, because this one may have kept memory of earlier steps.
    with ProcessPoolExecutor(1, mp_context=fork_context()) as pool:
        taken = pool.submit(_peak_of_lookup, n).result()
    out = 4 * 64 * n // 4
    planned = tt_scratch(LARGE, _load(n), "cpu", False, False)
    assert taken - out == pytest.approx(planned, rel=0.2)


@needs_gpu
@pytest.mark.parametrize("n", [16_000, 400_000])
@pytest.mark.parametrize("replicated", [False, True])
def test_a_run_on_a_gpu(n, replicated):
    ids = torch.randint(4_000_000, (n,), device="cuda")
    offsets = torch.arange(0, n + 1, 4, device="cuda")
    group = TTGroup([LARGE])
    cores = tt.random_cores(LARGE, "cuda")
    grad = torch.randn(n // 4, 64, device="cuda")

    def step():
        index = group.sort(ids, offsets, n // 4)
        group.lookup(cores, ids, offsets, n // 4, index=index)
        backward = group.flat_gradients if replicated else group.gradients
        backward(cores, grad, ids, offsets, n // 4, index=index)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    taken = torch.cuda.max_memory_allocated() - before
    planned = tt_scratch(LARGE, _load(n), "cuda", False, replicated)
    # The run also holds the output, and the gradients that it returns.
    beside = 4 * 64 * n // 4 + 4 * LARGE.num_elements
    assert planned <= taken * 1.05
    assert taken <= planned + beside + 2**20
