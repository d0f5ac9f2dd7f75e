"""Steps captured in a CUDA graph, and what a capture refuses."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import Adam
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU

GROUPS = {"one": [tt.LARGER[0]], "four cores": [tt.LARGER[2]], "several": tt.LARGER[:3]}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("batch_size", [40, 5000])  # with more ids than one cluster sorts
def test_captured_step_does_what_an_eager_one_does(name, batch_size):
    shapes = GROUPS[name]
    group = TTGroup(shapes, optimizer=Adam(eps=0.1))
    cores = [core for shape in shapes for core in tt.random_cores(shape, "cuda")]
    captured = tt.TrainedCores(group, cores)
    eager = tt.TrainedCores(group, [core.clone() for core in cores])
    static = tt.even_bags(shapes, batch_size)
    grad = torch.randn(batch_size, group.total_dim, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = tt.Bags(static.ids.clone(), static.offsets, static.weights, batch_size)
        captured.step(static, grad)
    torch.cuda.current_stream().wait_stream(side)
    eager.step(first, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.step(static, grad)
    for _ in range(3):
        bags = tt.even_bags(shapes, batch_size)
        static.ids.copy_(bags.ids)
        graph.replay()
        tt.assert_near(out, eager.step(bags, grad))
        for one, other in zip(captured.cores, eager.cores, strict=True):
            tt.assert_near(one, other, 2e-5)
    assert captured.counter.item() == 4


def test_capture_of_cores_that_were_not_used_is_refused():
    shape = tt.LARGER[0]
    group, bags = TTGroup([shape]), tt.even_bags([shape])
    cores = tt.random_cores(shape, "cuda")
    group.lookup(cores, bags.ids, bags.offsets, 40)
    others = [core.clone() for core in cores]
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"the cores of this group .* were not used before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        group.lookup(others, bags.ids, bags.offsets, 40)
    torch.cuda.synchronize()
    again = group.lookup(others, bags.ids, bags.offsets, 40)
    tt.assert_near(again, group.lookup(cores, bags.ids, bags.offsets, 40), 1e-6)
