"""``torch.fx`` keeps sharded modules as leaves; ``torch.compile`` compiles the layers above."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.train_pipeline import Tracer
from torchrec.fx import symbolic_trace

from tests.support.pipelines import evicted, make_pipeline_model, pipeline_batch

pytestmark = pytest.mark.compat

STEPS = 6


def _trace(rank, world_size, device):
    plain, traced = (make_pipeline_model(world_size, device, "row_wise") for _ in range(2))
    model = traced.module
    graph = Tracer().trace(model)
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    assert called == ["ebc", "ec", "over"]
    again = symbolic_trace(model, leaf_modules=[type(model.ebc).__name__, type(model.ec).__name__])
    for step in range(STEPS):
        expected = plain(pipeline_batch(rank, step, device))
        got = (torch.fx.GraphModule(model, graph) if step % 2 else again)(
            pipeline_batch(rank, step, device)
        )
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        for loss, _ in (expected, got):
            loss.backward()
    assert evicted(traced) == evicted(plain)


def test_sharded_modules_are_leaves(run_ranks):
    run_ranks(2, _trace)


def _compile(rank, world_size, device):
    plain, compiled = (make_pipeline_model(world_size, device, "row_wise") for _ in range(2))
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled.module.over = torch.compile(compiled.module.over, backend=backend)
    for step in range(STEPS):
        losses = [model(pipeline_batch(rank, step, device))[0] for model in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
        for loss in losses:
            loss.backward()
    gradients = [model.module.over.weight.grad for model in (plain, compiled)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)
    assert evicted(compiled) == evicted(plain)
    return len(graphs)


def test_the_dense_part_is_compiled(run_ranks):
    assert all(count > 0 for count in run_ranks(2, _compile))
