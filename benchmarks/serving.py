"""Lookups in read-only tables compared with FBGEMM's inference tables, in one process.

    python -m benchmarks serving --threads 1 --out benchmarks/results/serving_cpu.csv
    python -m benchmarks serving --device cuda --ids 1048576 --uniform --rows 4000000
    python -m benchmarks serving --device cuda --ids 1048576 --rows 20000000 --hbm-share .1 \
        --exponent 1.05 --skip-stock rows pooled

A request looks up ``--ids`` ids, with a power law or uniform, in a table of ``--rows`` rows.
``rows`` returns a row per id, ``pooled`` sums bags of 20 ids, and ``model, rows`` and ``model,
pooled`` do the same in an exported and loaded model. The peer is
``IntNBitTableBatchedEmbeddingBagsCodegen`` with the same ids as row numbers, and also
``torch.nn.functional.embedding`` for unpooled float rows on a GPU. The two are timed in turn,
``--rounds`` times over ``--requests`` requests each, which on a GPU run back to back. ``us``,
``p99_us``, ``peer_us`` and ``peer_p99_us`` are microseconds per request; ``ratio`` is the ratio of
the medians.

With ``--hbm-share``, only this share of the rows is in a GPU's memory, chosen by other requests of
the same number. ``hit_rate`` is the share of the timed lookups whose row is in the GPU's memory.
The peer is then FBGEMM's table in managed memory with a cache for that share of the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from torchrec_hkv.serving import KeyedIds, ServingModel, export, load
from torchrec_hkv.serving.page_cache import warm
from torchrec_hkv.serving.placement import Placement, rechoose_hot_rows
from torchrec_hkv.serving.table_builder import MEMORY_BYTES, TableBuilder
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

BAG = 20
KEYS = ("case", "format", "output", "rows", "dim", "ids", "law", "memory")
_TYPES = {
    "fp32": (SparseType.FP32, torch.float32),
    "fp16": (SparseType.FP16, torch.float16),
    "int8": (SparseType.INT8, torch.float16),
    "int4": (SparseType.INT4, torch.float16),
}

Request = Callable[[int], object]


class Rows(nn.Module):
    """A model whose output is the row of each id."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="t", embedding_dim=dim, num_embeddings=rows, feature_names=["ids"]
        )
        self.tables = EmbeddingCollection(tables=[table])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.tables(features)["ids"].values()


class Pooled(nn.Module):
    """A model whose output is the sum of the rows of each sample."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", embedding_dim=dim, num_embeddings=rows, feature_names=["ids"]
        )
        self.tables = EmbeddingBagCollection(tables=[table])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.tables(features).values()


def served(args: argparse.Namespace, kind: type[nn.Module], row_format: str) -> ServingModel:
    """Exports and loads a model with random rows, and deletes its files."""
    lengths = torch.tensor([2, 2])
    inputs = (KeyedJaggedTensor(keys=["ids"], values=torch.arange(4), lengths=lengths),)
    with tempfile.TemporaryDirectory() as name:
        export(kind(args.rows, args.dim), f"{name}/model", row_format, inputs=inputs)
        model = load(f"{name}/model", args.device, mapped=not args.resident)
        for thread in threading.enumerate():
            if thread.name == "warm":  # waits for the thread that reads the tables
                thread.join()
        return model


def requests_of(args: argparse.Namespace, warm_up: bool = False) -> Iterator[Tensor]:
    """Yields row numbers of each request. warm_up: draws other requests of the same
    distribution."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(args.rows, generator=generator)
    if warm_up:
        generator.manual_seed(4)
    for _ in range(args.requests):
        unit = torch.rand(args.ids, generator=generator, dtype=torch.float64)
        if args.uniform:
            ranks = unit * args.rows
        elif args.exponent == 1.0:
            ranks = args.rows**unit - 1
        else:
            power = 1.0 - args.exponent
            ranks = (1.0 + unit * (args.rows**power - 1.0)) ** (1.0 / power) - 1
        yield order[ranks.long().clamp(0, args.rows - 1)]


def table_of(args: argparse.Namespace, row_format: str, ids: Tensor) -> ReadOnlyTables:
    """Creates a table with random rows."""
    generator = torch.Generator().manual_seed(2)
    with tempfile.TemporaryDirectory() as folder:
        builder = TableBuilder(args.dim, row_format, Path(folder), args.memory_bytes)
        for part in ids.split(1 << 18):
            builder.add(part, torch.randn(part.numel(), args.dim, generator=generator))
        table_file = builder.finish(Path(folder) / "table")
        index, rows = table_file.map(Path(folder), resident=args.resident)
        if args.device == "cpu" and not args.resident:
            thread = warm(Path(folder), [(table_file, index)])
            if thread is not None:
                thread.join()
        table = ReadOnlyTable("t", args.dim, row_format, index, rows, table_file.unit)
        limit = None if args.hbm_share is None else int(args.hbm_share * rows.numel())
        placement = Placement(torch.device(args.device), args.resident, limit)
        table = placement.place([table])[0]
    counters = torch.zeros(1, 2, dtype=torch.int64, device=args.device)
    tables = ReadOnlyTables([table], counters)
    if table.hot is None:
        return tables
    for numbers in requests_of(args, warm_up=True):
        tables.rows(0, ids[numbers].to(args.device))
    return ReadOnlyTables([dataclasses.replace(table, hot=rechoose_hot_rows(table))], counters)


def hit_rate(tables: ReadOnlyTables, requests: Sequence[Tensor]) -> float | None:
    """Returns the share of the lookups whose row is in HBM; None if all rows are."""
    hot = tables.tables[0].hot
    if hot is None:
        return None
    hot.host_lookups.zero_()
    for request in requests:
        tables.rows(0, request)
    return round(1.0 - int(hot.host_lookups) / sum(request.numel() for request in requests), 4)


def fbgemm(args: argparse.Namespace, row_format: str, mode: PoolingMode, output: torch.dtype):
    """Creates FBGEMM's table with the same number of rows."""
    on_gpu = args.device != "cpu"
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    if args.hbm_share is not None:
        place = EmbeddingLocation.MANAGED_CACHING
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", args.rows, args.dim, _TYPES[row_format][0], place)],
        device=args.device,
        pooling_mode=mode,
        output_dtype=SparseType.FP32 if output == torch.float32 else SparseType.FP16,
        cache_load_factor=args.hbm_share or 0.2,  # any value without a cache
    )
    module.initialize_weights()
    module.fill_random_weights()
    return module


def times_us(call: Request, args: argparse.Namespace) -> list[float]:
    """Returns microseconds of each request, called once."""
    if args.device != "cpu":
        events = []
        for number in range(args.requests):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(number)
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in events]
    times = []
    for number in range(args.requests):
        began = time.perf_counter()
        call(number)
        times.append(1e6 * (time.perf_counter() - began))
    return times


def measure(
    ours: Request, peer: Request | None, args: argparse.Namespace
) -> dict[str, float | None]:
    """Times both sides in turn, after a round for warm-up; peer: None if it is skipped."""
    samples: dict[Request, list[float]] = {call: [] for call in (ours, peer) if call is not None}
    for number in range(args.rounds + 1):
        for call, times in samples.items():
            call_times = times_us(call, args)
            times.extend(call_times if number else [])
    us, peer_us = statistics.median(samples[ours]), None
    p99, peer_p99 = statistics.quantiles(samples[ours], n=100)[-1], None
    if peer is not None:
        peer_us = statistics.median(samples[peer])
        peer_p99 = statistics.quantiles(samples[peer], n=100)[-1]
    return {
        "us": round(us, 1),
        "p99_us": round(p99, 1),
        "peer_us": peer_us and round(peer_us, 1),
        "peer_p99_us": peer_p99 and round(peer_p99, 1),
        "ratio": peer_us and round(us / peer_us, 3),
        "g_ids_per_s": round(args.ids / us / 1e3, 3),
    }


def cases(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields all rows of the benchmark."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (args.rows,), generator=generator)
    numbers = list(requests_of(args))
    hashed = [ids[request].to(args.device) for request in numbers]
    peers = [request.int().to(args.device) for request in numbers]
    bags = args.ids // BAG
    lengths = torch.full((1, bags), BAG, device=args.device)
    offsets = torch.arange(args.ids + 1, dtype=torch.int32, device=args.device)
    bag_offsets = offsets[: bags * BAG + 1 : BAG].contiguous()
    pooled = [request[: bags * BAG] for request in hashed]
    pooled_peers = [request[: bags * BAG] for request in peers]
    for row_format in args.formats:
        tables = table_of(args, row_format, ids)
        peer_dtype = _TYPES[row_format][1] if args.device != "cpu" else torch.float32
        law = "power" if args.exponent == 1.0 else f"power {args.exponent:g}"
        memory = "resident" if args.resident else "mapped"
        if args.hbm_share is not None:
            memory = f"{args.hbm_share:g} in HBM"
        about = {
            "format": row_format,
            "output": str(peer_dtype).removeprefix("torch."),
            **{"rows": args.rows, "dim": args.dim, "ids": args.ids},
            "law": "uniform" if args.uniform else law,
            "memory": memory,
        }
        hits = {"hit_rate": hit_rate(tables, hashed)}
        peer = None
        if "rows" not in args.skip_stock:
            peer = fbgemm(args, row_format, PoolingMode.NONE, peer_dtype)
        got = measure(
            lambda n, t=tables, d=peer_dtype: t.rows(0, hashed[n], dtype=d),
            peer and (lambda n, p=peer: p(peers[n], offsets)),
            args,
        )
        yield {"case": "rows", **about, **got, **hits}
        if args.device != "cpu" and args.hbm_share is None and row_format in ("fp32", "fp16"):
            weight = torch.randn(args.rows, args.dim, device=args.device).to(peer_dtype)
            got = measure(
                lambda n, t=tables, d=peer_dtype: t.rows(0, hashed[n], dtype=d),
                lambda n, w=weight: torch.nn.functional.embedding(peers[n], w),
                args,
            )
            yield {"case": "rows, torch embedding", **about, **got, **hits}
            del weight
        peer = None
        if "pooled" not in args.skip_stock:
            peer = fbgemm(args, row_format, PoolingMode.SUM, peer_dtype)
        got = measure(
            lambda n, t=tables, d=peer_dtype: t.pool([0], pooled[n], lengths, dtype=d),
            peer and (lambda n, p=peer: p(pooled_peers[n], bag_offsets)),
            args,
        )
        yield {"case": "pooled", **about, **got, **hits}
        del tables
        if args.device != "cpu":
            continue
        for kind, name, bag in ((Rows, "rows", 1), (Pooled, "pooled", BAG)):
            model, bags = served(args, kind, row_format), args.ids // bag
            its_lengths = torch.full((1, bags), bag)
            requests = [
                KeyedIds(["ids"], request[: bags * bag], its_lengths) for request in numbers
            ]
            mode = PoolingMode.NONE if bag == 1 else PoolingMode.SUM
            peer = fbgemm(args, row_format, mode, peer_dtype)
            its_peers = peers if bag == 1 else pooled_peers
            its_offsets = offsets if bag == 1 else bag_offsets
            got = measure(
                lambda n, m=model, r=requests: m(r[n]),
                lambda n, p=peer, i=its_peers, o=its_offsets: p(i[n], o),
                args,
            )
            yield {"case": f"model, {name}", **about, **got, **hits}
        del model, peer


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return float(text)


def _share(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return float(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=AtLeast(1), default=1_000_000)
    parser.add_argument("--dim", type=AtLeast(1), default=128)
    parser.add_argument("--ids", type=AtLeast(BAG), default=2000, help="of a request")
    law = parser.add_mutually_exclusive_group()
    law.add_argument("--uniform", action="store_true", help="ids by no power law")
    law.add_argument("--exponent", type=_positive, default=1.0, help="of the power law")
    parser.add_argument("--hbm-share", type=_share, help="of the rows, on a GPU; default: all")
    parser.add_argument(
        "--memory-bytes", type=AtLeast(1), default=MEMORY_BYTES, help="to build a table"
    )
    parser.add_argument("--formats", nargs="+", choices=list(_TYPES), default=list(_TYPES))
    parser.add_argument(
        "--resident", action="store_true", help="tables in memory of the process, not mapped"
    )
    parser.add_argument(
        "--skip-stock",
        nargs="+",
        choices=["rows", "pooled"],
        default=[],
        help="cases without FBGEMM's tables, such as one for which its build has no kernel",
    )
    parser.add_argument("--requests", type=AtLeast(2), default=60)
    parser.add_argument("--rounds", type=AtLeast(1), default=8)
    parser.add_argument("--threads", type=AtLeast(1), default=1, help="of PyTorch, on a CPU")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    if args.hbm_share is not None and torch.device(args.device).type != "cuda":
        parser.error(f"--hbm-share is given, but --device is {args.device}, which has no HBM")
    torch.set_num_threads(args.threads)
    report(cases(args), args.out, KEYS)


if __name__ == "__main__":
    main()
