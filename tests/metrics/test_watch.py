"""A watch reads metrics every few steps without delaying them, and passes them to its sinks."""

import pytest
import torch

from tests.support.embeddings import make_embedding
from tests.support.small_models import batch, make_small
from torchrec_hkv import HKVOptimizer
from torchrec_hkv.metrics import Watch


def test_sinks_get_every_so_manieth_step_and_the_last(device_type):
    embedding = make_embedding(device=device_type)
    seen = []
    with Watch(embedding, 3, [lambda step, metrics: seen.append((step, metrics))]) as watch:
        for step in range(8):
            embedding(torch.arange(10 * (step + 1), device=device_type))
            watch.step()
    assert [step for step, _ in seen] == [3, 6, 8]
    # The tables' content at the time of the reading, not of the sink's call.
    assert [metrics["embedding"].size for _, metrics in seen] == [30, 60, 80]
    assert [metrics["embedding"].lookups for _, metrics in seen] == [60, 210, 360]
    assert watch.latest == seen[-1][1]


def test_close_twice_hands_on_once(device_type):
    embedding = make_embedding(device=device_type)
    seen = []
    with Watch(embedding, 3, [lambda step, metrics: seen.append(step)]) as watch:
        for _ in range(4):
            embedding(torch.arange(10, device=device_type))
            watch.step()
        watch.close()
    assert seen == [3, 4]


def test_an_error_in_the_block_begins_no_reading():
    """A reading sums over all ranks, and other ranks may have ended."""
    seen = []
    watch = Watch(make_embedding(), 3, [lambda step, metrics: seen.append(step)])

    def training():
        with watch:
            for step in range(5):
                if step == 4:
                    raise RuntimeError("of a step")
                watch.step()

    with pytest.raises(RuntimeError, match="of a step"):
        training()
    assert seen == [3]


def test_a_module_that_changes_its_tables_is_watched_still(device_type):
    embedding = make_embedding(device=device_type)
    watch = Watch(embedding, 1)
    HKVOptimizer(embedding)
    embedding(torch.arange(5, device=device_type))
    watch.step()
    watch.close()
    assert watch.latest["embedding"].size == 5


def _watched(rank, world_size, device):
    model = make_small(world_size, device, "hkv", sharding_type="table_wise")
    seen = []
    group = torch.distributed.group.WORLD
    with Watch(
        model, 2, [lambda step, m: seen.append((step, m["ebc.embedding_bags.t"].lookups))], group
    ) as watch:
        expected = [0]
        for step in range(4):
            features = [batch(other, device, step) for other in range(world_size)]
            model(features[rank]).sum().backward()
            expected.append(expected[-1] + sum(f["f"].values().numel() for f in features))
            watch.step()
    return seen, [(2, expected[2]), (4, expected[4])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ranks_hear_of_a_table_that_one_has(world_size, run_ranks):
    for seen, expected in run_ranks(world_size, _watched):
        assert seen == expected


@pytest.mark.gpu
def test_a_step_does_not_wait():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    embedding = make_embedding(device="cuda", init_capacity=4096)
    optimizer = HKVOptimizer(embedding)
    watch = Watch(embedding, 1)
    ids = torch.arange(100, device="cuda")
    for step in range(4):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            embedding(ids).sum().backward()
            optimizer.step()
            watch.step()
        finally:
            if step == 3:
                torch.cuda.set_sync_debug_mode("default")
    watch.close()
    assert watch.latest["embedding"].lookups == 400


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_impossible_intervals(every):
    with pytest.raises(ValueError, match=r"every is .*, but must be a number of steps"):
        Watch(make_embedding(), every)


def test_a_sink_that_can_not_be_called():
    with pytest.raises(TypeError, match="A sink is 3, but must be callable with a step"):
        Watch(make_embedding(), 1, [3])
