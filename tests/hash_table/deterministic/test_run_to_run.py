"""Training runs on the same batches end with the same bits, whatever else the device does."""

import contextlib
import threading

import pytest
import torch

from tests.support.batches import lookup
from tests.support.gpu import needs_gpu
from tests.support.power_law_bags import power_law_bags
from tests.support.table_states import assert_same_states
from tests.support.tiers import hbm_bytes_for
from torchrec_hkv.hash_table import (
    Adam,
    MinFrequency,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
)
from torchrec_hkv.hash_table.files.digest import table_digest

BATCH, STEPS = 300, 40
CAPACITIES, DIMS = (2000, 320, 1000), (32, 8, 20)
OPTIONS = {
    "lru": {},
    "lfu": {"eviction": "lfu"},
    "counted": {"admission": MinFrequency(2, entries=128), "remember_evicted": 100},
    "expiring and growing": {"expire_after": 6, "initial_capacity": 64},
}


def train(device, options, optimizer, deterministic=True, share=None, ahead=0):
    """Returns the group and the outputs of all steps. Gradients depend on outputs, so that errors
    spread.

    ahead: number of batches that are found before the backward of an earlier one.
    """
    specs = []
    for t, (capacity, dim) in enumerate(zip(CAPACITIES, DIMS, strict=True)):
        limit = None
        if share is not None:
            eviction = options.get("eviction", "lru")
            limit = hbm_bytes_for(share, capacity, dim, optimizer.state_width(dim), eviction)
        specs.append(
            TableSpec(
                f"t{t}",
                capacity,
                dim,
                hbm_bytes=limit,
                initializer=Uniform(-1, 1),
                deterministic=deterministic,
                **options,
            )
        )
    group = TableGroup(specs, [0, 1, 2, 0], optimizer, device=device)
    outputs, waiting = [], []
    for step in range(STEPS):
        waiting.append(lookup(group, power_law_bags(step, 4, BATCH, 6000).to(device)))
        if len(waiting) > ahead:
            out = waiting.pop(0)
            outputs.append(out.detach().clone())
            out.backward(out.detach().sin())
    return group, outputs


@contextlib.contextmanager
def load():
    """Runs other kernels, and another group's, on another stream."""
    stop = threading.Event()

    def work():
        matrix = torch.randn(1024, 1024, device="cuda")
        other = TableGroup([TableSpec("other", 3000, 16)], [0], device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(10_000):
                if stop.is_set():
                    return
                matrix = (matrix @ matrix).tanh()
                bags = power_law_bags(step, 1, 1000, 20_000).to("cuda")
                other.find_or_insert(bags.ids, bags.offsets, 1000)
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def compare(run, *others):
    (group, outputs), digests = run, []
    for other, its_outputs in others:
        for step, (actual, expected) in enumerate(zip(outputs, its_outputs, strict=True)):
            assert torch.equal(actual, expected), step
        assert_same_states(group, other)
        digests.append([table_digest(other, table) for table in range(len(DIMS))])
    assert all(actual == [table_digest(group, t) for t in range(len(DIMS))] for actual in digests)
    assert all(table["evicted"] > 100 for table in group.counters())


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(), Adam()], ids=["adagrad", "adam"])
@pytest.mark.parametrize("options", OPTIONS)
def test_equal_bits(device_type, options, optimizer, ahead):
    runs = [train(device_type, OPTIONS[options], optimizer, ahead=ahead)]
    if device_type == "cuda":
        with load():
            runs += [train("cuda", OPTIONS[options], optimizer, ahead=ahead) for _ in range(2)]
    else:
        before = torch.get_num_threads()
        for threads in (1, 3):
            torch.set_num_threads(threads)
            runs.append(train("cpu", OPTIONS[options], optimizer, ahead=ahead))
        torch.set_num_threads(before)
    compare(*runs)


@needs_gpu
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("options", ["lru", "lfu"])
def test_rows_in_host_memory(options, share):
    """Results equal those with all rows in HBM."""
    runs = [train("cuda", OPTIONS[options], Adam(), share=share)]
    with load():
        runs.append(train("cuda", OPTIONS[options], Adam(), share=share))
    runs.append(train("cuda", OPTIONS[options], Adam()))
    compare(*runs)


@needs_gpu
def test_the_same_with_torch_s_switch():
    torch.use_deterministic_algorithms(True)
    try:
        switched = train("cuda", {}, RowWiseAdagrad(), deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    compare(train("cuda", {}, RowWiseAdagrad()), switched)
