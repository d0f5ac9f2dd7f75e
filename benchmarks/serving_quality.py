"""Quality of exported models by row format: AUC and bytes compared with float32.

    python -m benchmarks serving_quality --data movietweetings.dat \\
        --data recbole-1.2.1-py3-none-any.whl --out benchmarks/results/serving_quality.csv

A DLRM (dense 32-DIM, over 64-32-1) with two hash tables for users and items, with ``--dim``
columns, is trained under ``DistributedModelParallel`` on the first 80 % of a click stream, in order
of time, and exported by ``serving.export`` once per row format. Each exported model is loaded and
scores the last 20 %. ``difference`` is the AUC minus that of the float32 export of the same seed,
as a mean over seeds, and ``worst`` is the lowest difference. ``bytes_ratio`` is the size of the
tables' files, including the index, divided by that of float32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.arguments import AtLeast
from benchmarks.environment import CsvFile
from benchmarks.quality_data import auc
from benchmarks.quality_streams import Stream, read
from benchmarks.ranks import joined_ranks
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    get_default_sharders,
    serving,
)

FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")
KEYS = ("stream", "format", "dim")
_TRAIN_SHARE, _BATCH = 0.8, 256
_ROW_RATE, _DENSE_RATE = 0.05, 1e-3


def features_of(stream: Stream, part: slice) -> KeyedJaggedTensor:
    """Returns the ids of a slice of rows, one id per feature."""
    values = torch.cat([ids[part] for ids in stream.ids.values()])
    return KeyedJaggedTensor(
        keys=list(stream.ids), values=values, lengths=torch.ones(values.numel(), dtype=torch.int64)
    )


def parts(begin: int, end: int, size: int) -> Iterator[slice]:
    """Yields slices of rows for batches."""
    for first in range(begin, end, size):
        yield slice(first, min(first + size, end))


def trained(stream: Stream, dim: int, train: int, seed: int) -> nn.Module:
    """Trains the model for one pass over the first rows of a stream."""
    torch.manual_seed(seed)
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=2 * ids.unique().numel(),
            embedding_dim=dim,
            feature_names=[name],
        )
        for name, ids in stream.ids.items()
    ]
    collection = EmbeddingBagCollection(configs, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": _ROW_RATE})
    model = DLRM(collection, stream.dense.shape[1], [32, dim], [64, 32, 1], torch.device("cpu"))
    constraints = {
        name: ParameterConstraints(compute_kernels=["hkv"], options=HKVOptions(seed=seed))
        for name in stream.ids
    }
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu")
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=_DENSE_RATE)
    for part in parts(0, train, _BATCH):
        logits = model(stream.dense[part], features_of(stream, part)).squeeze(1)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, stream.labels[part]).backward()
        optimizer.step()
    return model


def served_scores(model: serving.ServingModel, stream: Stream, train: int) -> Tensor:
    """Returns the scores of the test rows."""
    scores = []
    for part in parts(train, len(stream), 8 * _BATCH):
        values = torch.cat([ids[part] for ids in stream.ids.values()])
        lengths = torch.ones(len(stream.ids), values.numel() // len(stream.ids), dtype=torch.int64)
        ids = serving.KeyedIds(list(stream.ids), values, lengths)
        scores.append(model(stream.dense[part], ids).squeeze(1))
    return torch.cat(scores)


def measured(
    stream: Stream, formats: Sequence[str], dim: int, seeds: int
) -> Iterator[dict[str, object]]:
    """Yields the row of each format."""
    train = int(_TRAIN_SHARE * len(stream))
    labels = stream.labels[train:].double()
    aucs: dict[str, list[float]] = {name: [] for name in formats}
    sizes: dict[str, int] = {}
    for seed in range(seeds):
        model = trained(stream, dim, train, seed)
        inputs = (stream.dense[:2], features_of(stream, slice(0, 2)))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for row_format in formats:
                serving.export(model, folder / row_format, rows=row_format, inputs=inputs)
                served = serving.load(folder / row_format)
                aucs[row_format].append(auc(served_scores(served, stream, train), labels))
                files = (folder / row_format).glob("*.table")
                sizes[row_format] = sum(path.stat().st_size for path in files)
    base = torch.tensor(aucs["fp32"], dtype=torch.float64)
    for name in formats:
        format_aucs = torch.tensor(aucs[name], dtype=torch.float64)
        difference = format_aucs - base
        yield {
            "stream": stream.name,
            "format": name,
            "dim": dim,
            "auc": round(float(format_aucs.mean()), 5),
            "difference": round(float(difference.mean()), 6) + 0.0,
            "worst": round(float(difference.min()), 6) + 0.0,
            "bytes": sizes[name],
            "bytes_ratio": round(sizes[name] / sizes["fp32"], 4),
            "seeds": seeds,
            "rows": len(stream),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, action="append", required=True, help="a file; may be repeated")
    add("--dim", type=AtLeast(1), default=128, help="columns of a table (default: 128)")
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="(default: all)")
    add("--seeds", type=AtLeast(1), default=7, help="(default: 7)")
    add("--limit", type=AtLeast(1), default=None, help="earliest rows to keep")
    add("--threads", type=AtLeast(1), default=1)
    add("--out", type=Path, default=None, help="CSV file; keeps rows of other runs")
    args = parser.parse_args(arguments)
    if args.dim < 1 or args.seeds < 1:
        parser.error(f"--dim is {args.dim} and --seeds {args.seeds}, but must be at least 1")
    torch.set_num_threads(args.threads)
    streams = []
    for path in args.data:
        try:
            streams.append(read(path).first(args.limit))
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--data {path} can't be read: {error}")
    formats = list(dict.fromkeys(["fp32", *args.formats]))
    with joined_ranks(torch.device("cpu")), CsvFile(args.out, KEYS) as file:
        for stream in streams:
            for row in measured(stream, formats, args.dim, args.seeds):
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                file.write(row)


if __name__ == "__main__":
    main()
