"""The Redis example: after each write, the server has the trainer's rows."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.support.served_models import make_served, train
from torchrec_hkv import checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "redis_publish.py"


@pytest.fixture
def device_type() -> str:
    return "cpu"


@pytest.fixture
def server(tmp_path):
    redis = pytest.importorskip("redis", reason="needs redis-py")
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    path = tmp_path / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = redis.Redis(unix_socket_path=str(path))
    ends = time.monotonic() + 60
    while True:
        try:
            client.ping()
            break
        except redis.exceptions.ConnectionError:
            assert process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.02)
    yield client
    process.kill()
    process.wait()


def rows_of(model, name: str) -> dict[int, torch.Tensor]:
    return {
        int(id_): row
        for ids, rows in checkpoint.export_rows(model, name)
        for id_, row in zip(ids, rows, strict=True)
    }


def chained(rank, world_size, device, folder: Path, number: int):
    """A chain that grows by one write for each number, and the rows of two tables after each."""
    model = make_served(world_size, device)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    wanted = []
    for step in range(number):
        train(model, 2, seed=100 * step)
        writer.write(base=step == 3)
        wanted.append({name: rows_of(model, name) for name in ("user", "seen")})
        shutil.copytree(folder / "chain", folder / f"chain-{step}")
    return wanted


@pytest.mark.parametrize("row_format", ["fp32", "int8"])
def test_published(row_format, server, run_ranks, tmp_path):
    spec = importlib.util.spec_from_file_location("redis_publish", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    wanted = run_ranks(1, chained, tmp_path, 5)[0]
    tables = {"user": "ebc.embedding_bags.user", "seen": "sequence.embeddings.seen"}
    left = 0
    chain = tmp_path / "served"
    for step, applied in ((0, 1), (2, 2), (4, 2)):
        shutil.rmtree(chain, ignore_errors=True)
        shutil.copytree(tmp_path / f"chain-{step}", chain)
        publisher = example.Publisher(server, chain, row_format)
        assert publisher.publish() == applied
        assert publisher.publish() == 0
        version = server.hgetall("torchrec_hkv:version")
        assert (int(version[b"number"]), int(version[b"generation"])) == (step, step // 3 * 3)
        total = 0
        for name, table in tables.items():
            rows = wanted[step][name]
            dim = len(next(iter(rows.values())))
            got = example.look_up(server, table, list(rows), dim, row_format)
            near = 0.0 if row_format == "fp32" else 0.02
            torch.testing.assert_close(got, torch.stack(list(rows.values())), rtol=near, atol=near)
            assert not example.look_up(server, table, [12345], dim, row_format).any()
            total += len(rows)
            left += len(wanted[max(0, step - 1)][name].keys() - rows.keys())
            assert len(list(server.scan_iter(f"torchrec_hkv:*:{table}:*"))) == len(rows)
    assert left > 0
