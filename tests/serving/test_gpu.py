"""A GPU gives the same rows as a CPU, and serves a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.served_models import SEEDS, exported, random_batch
from torchrec_hkv import checkpoint, serving
from torchrec_hkv.hash_table import Normal, Uniform, table_seed
from torchrec_hkv.hash_table.initializers import op_arguments
from torchrec_hkv.serving import ops, row_formats
from torchrec_hkv.serving.table_file import build_layer
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
OPS = torch.ops.torchrec_hkv
IDS = 3000


def table(name: str, dim: int, row_format: str, seed: int) -> ReadOnlyTable:
    """A table of even ids; some are changed, some erased."""
    generator = torch.Generator().manual_seed(seed)

    def data(n: int) -> torch.Tensor:
        rows = torch.randn(n, dim, generator=generator)
        return row_formats.to_bytes(rows, row_format, row_formats.unit_for(8.0))

    layer = build_layer(torch.arange(0, 2 * IDS, 2), data(IDS))
    changed = torch.arange(0, 2 * IDS, 10)
    layer_above = build_layer(changed, data(changed.numel()), changed % 20 == 0)
    default = torch.randn(dim, generator=generator) if seed % 2 else None
    initial = op_arguments(Normal(0.0, 1.0) if seed % 4 else Uniform(-1.0, 2.0))
    return ReadOnlyTable(
        name, dim, row_format, *layer, row_formats.unit_for(8.0), table_seed(3, name), initial,
        default, *layer_above,
    )  # fmt: skip


def on_gpu(its: ReadOnlyTable) -> ReadOnlyTable:
    tensors = {
        field.name: getattr(its, field.name).cuda()
        for field in dataclasses.fields(its)
        if isinstance(getattr(its, field.name), torch.Tensor)
    }
    return dataclasses.replace(its, **tensors)


def pairs(dims, row_format) -> tuple[ReadOnlyTables, ReadOnlyTables]:
    tables = [table(f"t{n}", dim, row_format, n) for n, dim in enumerate(dims)]
    counters = torch.zeros(len(tables), 2, dtype=torch.int64, device="cuda")
    return ReadOnlyTables(tables), ReadOnlyTables([on_gpu(its) for its in tables], counters)


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows(row_format, dtype):
    for dim in (1, 3, 4, 20, 30, 64, 128, 200, 516):
        host, device = pairs([dim], row_format)
        ids = torch.randint(0, 2 * IDS, (5000,), generator=torch.Generator().manual_seed(dim))
        want = host.rows(0, ids, dtype=dtype)
        got = device.rows(0, ids.cuda(), dtype=dtype)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)
        assert torch.equal(device.counters.cpu(), host.counters)
    assert device.rows(0, ids[:0].cuda()).shape == (0, dim)


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
@pytest.mark.parametrize("kind", [ops.SUM, ops.SCALED_ROWS, ops.SCALED_SUM, ops.DIVIDED_SUM])
def test_pooled(row_format, kind):
    """Both devices sum a bag in the order of its ids."""
    for dims, weighted, dtype in (
        ([128, 16, 64], True, torch.float32),
        ([7, 200, 36], False, torch.float32),
        ([256, 4, 12], False, torch.float16),
    ):
        host, device = pairs(dims, row_format)
        generator = torch.Generator().manual_seed(dims[0])
        lengths = torch.randint(0, 40, (4, 150), generator=generator)
        lengths[1] = 0
        ids = torch.randint(0, 2 * IDS, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(ids.numel(), generator=generator) if weighted else None
        features, tables = [3, 0, 1, 3, 2], [0, 1, 2, 2, 1]
        kinds = [kind, kind + ops.FUSED, kind, kind, kind]
        rest = (features, tables, kinds, sum(dims[t] for t in tables), dtype)
        want = OPS.serving_pool(host.handle, ids, lengths, weights, *rest)
        on_device = None if weights is None else weights.cuda()
        got = OPS.serving_pool(device.handle, ids.cuda(), lengths.cuda(), on_device, *rest)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)
        assert torch.equal(device.counters.cpu(), host.counters)


def test_cuda_graph():
    """A pooled lookup does not synchronize, so a graph can capture it."""
    host, device = pairs([64], "int8")
    ids, lengths = torch.arange(0, 100).cuda(), torch.full((1, 20), 5).cuda()
    device.pool([0], ids, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = device.pool([0], ids, lengths)
    ids.add_(500)
    graph.replay()
    torch.testing.assert_close(out.cpu(), host.pool([0], ids.cpu(), lengths.cpu()), rtol=0, atol=0)


def on_one(rank, world_size, device, folder) -> list:
    want = exported(rank, world_size, device, folder / "model", "row_wise")
    model = serving.load(folder / "model", device)
    for seed, outputs in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))
        for key, value in outputs.items():
            torch.testing.assert_close(got[key].cpu(), value, rtol=1e-6, atol=1e-6)
    return want


@pytest.mark.parametrize("device_type", ["cuda"])
def test_model(run_ranks, tmp_path, device_type):
    want = run_ranks(1, on_one, tmp_path)[0]
    # A model trained on a GPU serves on a CPU, too.
    model = serving.load(tmp_path / "model")
    for seed, outputs in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))
        torch.testing.assert_close(got["scores"], outputs["scores"], rtol=1e-5, atol=1e-5)


def followed(rank, world_size, device, folder) -> None:
    from tests.support.served_models import make_served, outputs_of, train

    model = make_served(world_size, device)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    writer.write()
    inputs = random_batch(0, device=device)
    serving.export(model, folder / "model", inputs=inputs, deltas=folder / "chain")
    served = serving.load(folder / "model", device)
    follower = serving.follow(served, folder / "chain", every=None)
    for step in range(3):
        train(model, 2, seed=100 * step)
        writer.write(base=step == 2)
        assert follower.poll() == 1
        got, want = served(*random_batch(5, 4)), outputs_of(model, 5, 4)
        for key, value in want.items():
            torch.testing.assert_close(got[key].cpu(), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device_type", ["cuda"])
def test_followed(run_ranks, tmp_path, device_type):
    run_ranks(1, followed, tmp_path)
