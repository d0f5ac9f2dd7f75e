"""What the agents of test_two_agents.py run: trains a sharded table, and continues from a chain.

    torchrun … tests/stress/two_agents.py FOLDER SHARDING_TYPE STEPS PAUSE

A step trains the same samples at any number of ranks, so rows after a step do not depend on that
number. Every third step writes a delta. FOLDER/progress gets a line for each start and for the end:
the numbers of ranks and of ranks per host, the step it continued from, and a digest.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints, checkpoint

SAMPLES, IDS = 24, 300
TABLES = ("a", "b")


def samples(step: int, rank: int, ranks: int) -> KeyedJaggedTensor:
    """This rank's samples of a step: each has one id of each table."""
    generator = torch.Generator().manual_seed(step)
    spread = torch.randint(-(2**63), 2**63 - 1, (IDS,), generator=torch.Generator().manual_seed(7))
    drawn = spread[torch.randint(0, IDS, (len(TABLES), SAMPLES), generator=generator)]
    own = drawn[:, rank * SAMPLES // ranks : (rank + 1) * SAMPLES // ranks]
    return KeyedJaggedTensor(
        keys=list(TABLES), values=own.flatten(), lengths=torch.ones(own.numel(), dtype=torch.int32)
    )


def train(folder: Path, sharding_type: str, steps: int, pause: float) -> None:
    """Trains up to a step, starting from the newest state of the folder's chain."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=4096, embedding_dim=8, feature_names=[name])
        for name in TABLES
    ]
    # A host of one rank can't shard over its ranks.
    kind = sharding_type if ranks > 1 else "row_wise"
    constraint = ParameterConstraints(
        compute_kernels=["hkv"], sharding_types=[kind], min_partition=4
    )
    # Row-wise Adagrad would only see a shard's columns.
    model = make_model(tables, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-6})
    constraints = dict.fromkeys(TABLES, constraint)
    model = shard_model(model, constraints, ranks, torch.device("cpu"))
    first, chain = 0, folder / "chain"
    if (chain / "deltas.json").is_file():
        checkpoint.load(chain, model)
        first = _clock(model)
    _say(rank, folder, f"begin {ranks} {os.environ['LOCAL_WORLD_SIZE']} {first} {_digest(model)}")
    writer = checkpoint.DeltaWriter(model, chain, every_steps=3)
    for step in range(first, steps):
        # TorchRec divides gradients by the number of ranks; this undoes it, as if all samples were
        # one batch.
        (model(samples(step, rank, ranks)).square().sum() / SAMPLES * ranks).backward()
        if writer.step() is not None:
            _say(rank, folder, f"wrote {ranks} 0 {step + 1} {_digest(model)}")
        time.sleep(pause)
    rows = {name: [] for name in TABLES}
    for name in TABLES:
        for ids, values in checkpoint.export_rows(model, name):
            rows[name].append((ids, values))
    if rank == 0:
        torch.save(rows, folder / "rows.pt")
    _say(rank, folder, f"end {ranks} 0 {steps} {_digest(model)}")


def _clock(model) -> int:
    """Steps that the tables have trained; a rank may have no table."""
    lookups = model.module.ebc.group_lookups().values()
    clock = torch.tensor([0, *(lookup._group.clock for lookup in lookups)]).amax()
    dist.all_reduce(clock, dist.ReduceOp.MAX)
    return int(clock)


def _digest(model) -> str:
    return ",".join(checkpoint.digest(model).values())


def _say(rank: int, folder: Path, line: str) -> None:
    if rank == 0:
        with open(folder / "progress", "a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    gc.collect()
    dist.destroy_process_group()
