"""Two ranks train and export a click model. A process without TorchRec serves it and follows three
deltas: after each, all outputs equal the trainer's."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.support.models import shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, TTOptions, checkpoint, serving

DIM, USERS, MOVIES, GENRES = 16, 500, 300, 18
ROUNDS, BATCHES, BATCH = 3, 6, 64
KEYS = ["user", "movie", "series", "genres"]
META = torch.device("meta")

#: Answers each round's batches once the trainer has written them.
SERVER = """
import sys, time, traceback
from pathlib import Path
import torch
from torchrec_hkv import serving

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])

def wait_for(path):
    while not path.exists():
        time.sleep(0.02)

def serve():
    wait_for(folder / "round-0")
    model = serving.load(folder / "model", verify=True)
    follower = serving.follow(model, folder / "chain", every=None)
    batches = torch.load(folder / "batches")
    for number in range(rounds + 1):
        wait_for(folder / f"round-{number}")
        follower.poll()
        freshness = model.freshness()
        assert freshness.error is None, freshness.error
        assert number == 0 or (freshness.number, freshness.behind) == (number, 0), freshness
        outputs = [model(dense, serving.KeyedIds(*ids)) for dense, ids in batches]
        torch.save(outputs, folder / "answer.part")
        (folder / "answer.part").rename(folder / f"answer-{number}")
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("torchrec", "fbgemm_gpu")]
    assert loaded == [], loaded
    assert not torch.distributed.is_initialized()
    counts = model.counters()["sparse_arch.embedding_bag_collection.embedding_bags.user"]
    assert counts["unknown"] > 0, counts

try:
    serve()
except BaseException:
    (folder / "failed").write_text(traceback.format_exc())
    raise
"""


def ratings(seed: int, n: int, late: bool = False):
    """Rows like those of MovieLens: users and movies by a power law, some genres for each movie,
    and whether the user liked it. Late rows have new users."""
    random = torch.Generator().manual_seed(seed)

    def drawn(size: int) -> torch.Tensor:
        return (size ** torch.rand(n, generator=random)).long() - 1

    user, movie = drawn(USERS) + (USERS // 2 if late else 0), drawn(MOVIES)
    counts = 1 + movie % 3
    of = zip(movie.tolist(), counts.tolist(), strict=True)
    genres = torch.cat([(7 * number + torch.arange(count)) % GENRES for number, count in of])
    liked = torch.rand(n, generator=random) < torch.where((movie + user) % 2 == 0, 0.8, 0.2)
    ones = torch.ones(n, dtype=torch.long)
    features = KeyedJaggedTensor(
        keys=KEYS,
        values=torch.cat([user * 0x9E3779B97F4A7C1 - 5, movie * -104729, movie // 10, genres]),
        lengths=torch.cat([ones, ones, ones, counts]),
    )
    dense = torch.stack([movie / MOVIES, torch.rand(n, generator=random)], dim=1)
    return dense, features, liked.float()


def make_model(world_size: int, device: torch.device):
    torch.manual_seed(0)
    kinds = {
        "user": ("hkv", HKVOptions(seed=1, expire_after=40), "row_wise", 4 * USERS),
        "movie": ("hkv", HKVOptions(seed=2), "table_wise", 4 * MOVIES),
        "series": ("tt", TTOptions(ranks=(4, 4)), "table_wise", MOVIES),
        "genres": ("fused", None, "row_wise", GENRES),
    }
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=rows,
            feature_names=[name],
            pooling=PoolingType.MEAN if name == "genres" else PoolingType.SUM,
        )
        for name, (_, _, _, rows) in kinds.items()
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables, device=META), 2, [32, DIM], [32, 1])
    arch = model.sparse_arch
    apply_optimizer_in_backward(RowWiseAdagrad, arch.parameters(), {"lr": 0.1})
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernel], options=options, sharding_types=[sharding]
        )
        for name, (kernel, options, sharding, _) in kinds.items()
    }
    return shard_model(model, constraints, world_size, device)


def evaluate(model, batches) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        outputs = [model(dense, features).clone() for dense, features, _ in batches]
    model.train()
    return outputs


def trained(rank, world_size, device, folder: Path):
    """Trains four rounds, and after each waits for the answers of the serving process."""
    model = make_model(world_size, device)
    dense = [p for name, p in model.named_parameters() if "sparse_arch" not in name]
    optimizer = torch.optim.Adagrad(dense, lr=0.1)
    writer = checkpoint.DeltaWriter(model, folder / "chain", states=False)
    batches = [ratings(9000 + n, 40, late=True) for n in range(3)]
    losses = []
    for number in range(ROUNDS + 1):
        for step in range(BATCHES):
            inputs, features, liked = ratings(100 * number + 10 * step + rank, BATCH)
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                model(inputs, features).squeeze(1), liked
            )
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        writer.write()
        if number == 0:
            export = {"inputs": batches[0][:2], "deltas": folder / "chain"}
            serving.export(model, folder / "model", **export)
        want = evaluate(model, batches)
        if rank == 0:
            if number == 0:
                save_batches(folder / "batches", batches)
            (folder / f"round-{number}").touch()
        compare(folder, number, want)
    return losses


def save_batches(path: Path, batches) -> None:
    """Saves batches for the serving process, which has no KeyedJaggedTensor."""
    arguments = [(d, (f.keys(), f.values(), f.lengths().view(4, -1))) for d, f, _ in batches]
    torch.save(arguments, path)


def compare(folder: Path, number: int, want: list[torch.Tensor]) -> None:
    """Compares the serving process's answers. Row-wise, ranks sum their parts of a bag."""
    path, failed, ends = folder / f"answer-{number}", folder / "failed", time.monotonic() + 200
    while not path.exists():
        assert not failed.exists(), failed.read_text()
        assert time.monotonic() < ends, "no answer"
        time.sleep(0.02)
    for got, its in zip(torch.load(path), want, strict=True):
        torch.testing.assert_close(got, its, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_served_as_trained(run_ranks, tmp_path):
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path), str(ROUNDS)])
    try:
        losses = run_ranks(2, trained, tmp_path, timeout=240)[0]
        assert server.wait(timeout=60) == 0, (tmp_path / "failed").read_text()
    finally:
        server.kill()
    assert sum(losses[-6:]) < sum(losses[:6])  # the compared outputs do change
