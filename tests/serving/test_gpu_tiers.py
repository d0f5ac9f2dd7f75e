"""On a GPU, tables larger than HBM give the same results as tables in HBM, whatever rows are
hot."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.serving.test_gpu import IDS, on_gpu, table
from tests.support.served_models import make_served, outputs_of, random_batch, train
from torchrec_hkv import checkpoint, serving
from torchrec_hkv.serving import ops, row_formats
from torchrec_hkv.serving.lookup_counts import counts_of, read_codes
from torchrec_hkv.serving.manifest import ServingManifest
from torchrec_hkv.serving.placement import Placement, rechoose_hot_rows
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
OPS = torch.ops.torchrec_hkv
CUDA = torch.device("cuda")


def tiered(its: ReadOnlyTable, share: float) -> ReadOnlyTable:
    """A table with this share of its rows in HBM; the hot rows are random."""
    bare = dataclasses.replace(its, changed_index=None, changed_rows=None)
    placed = Placement(CUDA, False, int(share * its.rows.numel())).place([bare])[0]
    above = on_gpu(its)
    return dataclasses.replace(
        placed, default_row=above.default_row, changed_index=above.changed_index,
        changed_rows=above.changed_rows,
    )  # fmt: skip


def shuffled(its: ReadOnlyTable) -> ReadOnlyTable:
    """The same table with other hot rows."""
    generator = torch.Generator().manual_seed(1)
    its.hot.counts.copy_(torch.randint(0, 9, its.hot.counts.shape, generator=generator))
    return dataclasses.replace(its, hot=rechoose_hot_rows(its))


def opened(tables: list[ReadOnlyTable]) -> ReadOnlyTables:
    return ReadOnlyTables(tables, torch.zeros(len(tables), 2, dtype=torch.int64, device=CUDA))


def power_law(n: int, seed: int) -> Tensor:
    """Ids of :func:`table`; about half are missing."""
    unit = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((2 * IDS) ** unit - 1).long().mul(7919).remainder(2 * IDS).cuda()


def test_opcheck():
    torch.library.opcheck(OPS.serving_pinned, (torch.ones(70, 8, dtype=torch.uint8), CUDA))


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows(row_format, dtype):
    for dim, share in ((1, 0.3), (3, 0.0), (4, 0.5), (30, 0.01), (64, 0.9), (128, 0.1), (516, 0.2)):
        its = table("t", dim, row_format, dim)
        whole, parts = opened([on_gpu(its)]), tiered(its, share)
        ids = power_law(5000, dim)
        want = whole.rows(0, ids, dtype=dtype)
        for held in (parts, shuffled(parts)):
            got = opened([held])
            torch.testing.assert_close(got.rows(0, ids, dtype=dtype), want, rtol=0, atol=0)
            assert torch.equal(got.counters, whole.counters)


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
@pytest.mark.parametrize("kind", [ops.SUM, ops.SCALED_ROWS, ops.DIVIDED_SUM])
def test_pooled(row_format, kind):
    """One of the tables is entirely in HBM."""
    for dims in ([128, 16, 64], [7, 200, 36]):
        host = [table(f"t{n}", dim, row_format, n) for n, dim in enumerate(dims)]
        parts = [tiered(host[0], 0.1), on_gpu(host[1]), tiered(host[2], 0.0)]
        generator = torch.Generator().manual_seed(dims[0])
        lengths = torch.randint(0, 40, (4, 150), generator=generator)
        ids = power_law(int(lengths.sum()), 1)
        weights = torch.rand(ids.numel(), generator=generator).cuda()
        features, tables = [3, 0, 1, 3, 2], [0, 1, 2, 2, 1]
        rest = (features, tables, [kind] * 5, sum(dims[t] for t in tables), torch.float32)
        results = []
        for each in ([on_gpu(its) for its in host], parts, [shuffled(parts[0]), *parts[1:]]):
            held = opened(each)
            results.append(OPS.serving_pool(held.handle, ids, lengths.cuda(), weights, *rest))
            results.append(held.counters)
        torch.testing.assert_close(results[2:], 2 * results[:2], rtol=0, atol=0)


def test_host_lookups():
    """Counts only lookups that read a row in host memory. One in five even ids is in the layer of
    changes."""
    its = table("t", 16, "fp16", 0)
    ids = torch.arange(2 * IDS).cuda()
    is_in_base = (ids % 2 == 0) & (ids % 10 != 0)
    for share in (0.0, 0.25, 0.75):
        parts = tiered(its, share)
        held = opened([parts])
        held.rows(0, ids)
        held.pool([0], ids, torch.tensor([[2 * IDS]]).cuda())
        order = torch.empty(IDS, dtype=torch.int64)  # ids ordered by row
        index = its.index.view(-1, 8)
        for bucket in index.tolist():
            first, count = bucket[0] & ((1 << 40) - 1), bucket[0] >> 40 & 7
            order[first : first + count] = torch.tensor(bucket[1 : 1 + count])
        hot = order[: parts.hot.rows.shape[0]].cuda()  # without counts, the first rows
        want = 2 * int((is_in_base & ~torch.isin(ids, hot)).sum())
        assert int(parts.hot.host_lookups) == want
        assert want > 0


def test_choice():
    """Rows that are looked up move to HBM, and leave when others are looked up."""
    its = table("t", 8, "fp32", 1)
    parts = tiered(its, 0.1)
    generator = torch.Generator().manual_seed(0)
    known = torch.arange(0, 2 * IDS, 2)
    known = known[known % 10 != 0]  # not in the layer of changes
    groups = known[torch.randperm(known.numel(), generator=generator)].split(IDS // 10)[:2]
    for wanted in groups:
        held = opened([parts])
        for _ in range(200):
            held.rows(0, wanted[torch.randperm(wanted.numel(), generator=generator)].cuda())
            held.rows(0, known[:100].cuda())
        counts = parts.hot.counts.clone()
        assert int(counts.sum()) == pytest.approx(200 * (wanted.numel() + 100) / 8, rel=0.1)
        parts = dataclasses.replace(parts, hot=rechoose_hot_rows(parts))
        assert torch.equal(parts.hot.counts, counts // 2)
        parts.hot.host_lookups.zero_()
        held = opened([parts])
        held.rows(0, wanted.cuda())
        assert int(parts.hot.host_lookups) <= 100  # lookups of other rows
        parts.hot.counts.zero_()


def test_cuda_graph():
    its = table("t", 64, "int8", 3)
    whole, parts = opened([on_gpu(its)]), opened([tiered(its, 0.2)])
    ids, lengths = torch.arange(0, 100).cuda(), torch.full((1, 20), 5).cuda()
    parts.pool([0], ids, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = parts.pool([0], ids, lengths)
    ids.add_(500)
    graph.replay()
    torch.testing.assert_close(out, whole.pool([0], ids, lengths), rtol=0, atol=0)


class Pooled(nn.Module):
    """Pools two tables."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=32, num_embeddings=n, feature_names=[name])
            for name, n in (("large", 40_000), ("small", 100))
        ]
        self.tables = EmbeddingBagCollection(tables=tables)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.tables(features).values()


def batch(seed: int) -> serving.KeyedIds:
    unit = torch.rand(2, 4000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = torch.stack([50_000 ** unit[0] - 1, 101 * unit[1]]).long().flatten()
    return serving.KeyedIds(["large", "small"], values, torch.full((2, 400), 10))


def exported(folder: Path) -> Path:
    inputs = KeyedJaggedTensor(
        keys=["large", "small"], values=torch.arange(8), lengths=torch.full((4,), 2)
    )
    serving.export(Pooled(), folder, "int8", inputs=(inputs,))
    return folder


LARGE, SMALL = "tables.embedding_bags.large", "tables.embedding_bags.small"


def hot_rows(model: serving.ServingModel) -> dict[str, int | None]:
    tables = model._version.tables.tables
    return {its.name: None if its.hot is None else its.hot.rows.shape[0] for its in tables}


@pytest.mark.parametrize(
    ("hbm_bytes", "large", "small"),
    [
        (0, 0, 0),
        (35, 0, 0),  # less than one row of each
        (1000, 13, 13),
        (100_000, 2677, None),
        (1 << 50, None, None),
        (None, None, None),
        ({"large": 72}, 2, None),
        ({SMALL: 36, "large": 1 << 50}, None, 1),
    ],
)
@pytest.mark.parametrize("mapped", [True, False])
def test_hbm_bytes(hbm_bytes, large, small, mapped, tmp_path):
    folder = exported(tmp_path / "model")
    model = serving.load(folder, "cuda", hbm_bytes=hbm_bytes, mapped=mapped)
    assert hot_rows(model) == {LARGE: large, SMALL: small}
    whole = serving.load(folder, "cuda")
    for step in range(3):
        got, want = model(batch(step)), whole(batch(step))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        model.choose_hot_rows()
    assert hot_rows(model) == {LARGE: large, SMALL: small}
    counters = model.counters()
    host = {name: its.pop("host_lookups", None) for name, its in counters.items()}
    assert counters == whole.counters()
    assert [host[LARGE] is None, host[SMALL] is None] == [large is None, small is None]
    if large is not None:
        assert 0 < host[LARGE] <= counters[LARGE]["lookups"] - counters[LARGE]["unknown"]
        name = "torchrec_hkv_serving_host_lookups_total"
        assert f'{name}{{table="{LARGE}"}} {host[LARGE]}' in model.metrics().splitlines()


def test_choice_while_calls_run(tmp_path):
    folder = exported(tmp_path / "model")
    model = serving.load(folder, "cuda", hbm_bytes={"large": 36 * 4000, "small": 36})
    whole = serving.load(folder, "cuda")
    batches = [batch(seed) for seed in range(8)]
    want = [whole(its) for its in batches]
    ended, failures = threading.Event(), []

    def calls() -> None:
        try:
            while not ended.is_set():
                for its, expected in zip(batches, want, strict=True):
                    assert torch.equal(model(its), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=calls) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        model.choose_hot_rows()
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures
    for its in 20 * batches:
        model(its)
    model.choose_hot_rows()
    before = model.counters()[LARGE]["host_lookups"]
    for its in batches:
        model(its)
    assert model.counters()[LARGE]["host_lookups"] - before < 8 * 4000 * 0.3


def trained(rank, world_size, device, folder) -> None:
    model = make_served(world_size, device)
    train(model, 4)
    serving.export(model, folder, inputs=random_batch(0, device=device), lookup_counts=True)


@pytest.mark.parametrize("device_type", ["cuda"])
def test_counts_of_training(run_ranks, tmp_path, device_type):
    """The rows looked up most in training are hot from the start."""
    run_ranks(1, trained, tmp_path / "model")
    model = serving.load(tmp_path / "model", "cuda", hbm_bytes={"item": 320, "country": 800})
    records = {its.name: its for its in ServingManifest.read(tmp_path / "model").tables}
    for its in model._version.tables.tables:
        if its.hot is None:
            continue
        counts = torch.zeros(its.rows.shape[0], dtype=torch.int32)  # a stock table has no counts
        record = records[its.name]
        if record.counts is not None:
            counts = counts_of(read_codes(tmp_path / "model", record.counts, len(counts)))
        assert (counts.max() > 0) == its.name.endswith("item")
        assert its.hot.rows.shape[0] == 10
        assert torch.equal(its.hot.words.cpu(), OPS.serving_choose_hot(counts, None, 10))
        assert torch.equal(its.hot.counts.cpu(), counts)


def followed(rank, world_size, device, folder, process) -> None:
    """Follows deltas, a new base and a rollback; chooses hot rows in between."""
    model = make_served(world_size, device)
    train(model, 2, seed=7)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    writer.write()
    inputs = random_batch(0, device=device)
    serving.export(model, folder / "model", inputs=inputs, deltas=folder / "chain")
    limits = {"user": 300, "item": 0, "country": 400, "seen": 64}
    parts = serving.load(folder / "model", device, hbm_bytes=limits)
    whole = serving.load(folder / "model", device)
    assert {None} < set(hot_rows(parts).values())
    followers = [
        serving.follow(parts, folder / "chain", every=None, process=process),
        serving.follow(whole, folder / "chain", every=None),
    ]
    results = []
    for step in range(4):
        train(model, 2, seed=100 * step)
        writer.write(base=step == 2)
        for follower in followers:
            assert follower.poll() == 1
        host = parts.counters()["ebc.embedding_bags.item"]["host_lookups"]
        got, want = parts(*random_batch(5, 4)), whole(*random_batch(5, 4))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        for key, value in outputs_of(model, 5, 4).items():
            torch.testing.assert_close(got[key].cpu(), value, rtol=1e-6, atol=1e-6)
        if step == 2:  # a new base takes counts over by id
            counted = [its for its in parts._version.tables.tables if its.hot is not None]
            assert all(int(its.hot.counts.sum()) > 0 for its in counted)
        if step == 2:  # otherwise all rows may be in the layer of changes
            assert parts.counters()["ebc.embedding_bags.item"]["host_lookups"] > host
        parts.choose_hot_rows()
        results.append(want)
    for follower in followers:
        follower.rollback()
    torch.testing.assert_close(parts(*random_batch(5, 4)), results[2], rtol=0, atol=0)
    parts.choose_hot_rows()
    torch.testing.assert_close(parts(*random_batch(5, 4)), results[2], rtol=0, atol=0)


@pytest.mark.parametrize("device_type", ["cuda"])
@pytest.mark.parametrize("process", [False, True])
def test_followed(run_ranks, tmp_path, device_type, process):
    run_ranks(1, followed, tmp_path, process)
