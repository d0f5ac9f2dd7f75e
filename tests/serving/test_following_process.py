"""Another process updates a model to its trainer's outputs; the model stays whole if that process
fails."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.support.served_models import SEEDS, make_served, outputs_of, random_batch, train
from torchrec_hkv import checkpoint, serving
from torchrec_hkv.serving.following import Follower
from torchrec_hkv.serving.following_process import ProcessFollower


def outputs(model) -> list[dict[str, torch.Tensor]]:
    return [outputs_of(model, seed, 2 + seed) for seed in SEEDS]


def assert_served(model: serving.ServingModel, want, near: float = 0.0) -> None:
    for seed, its in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))
        for key, value in its.items():
            torch.testing.assert_close(got[key], value, rtol=near, atol=near)


def begun(folder: Path, device, rows: str | None = None, knows: bool = True):
    """A model after some steps, its writer and its export."""
    model = make_served(1, device, "row_wise")
    train(model, 3)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    writer.write()
    deltas = folder / "chain" if knows else None
    serving.export(model, folder / "model", rows, inputs=random_batch(0), deltas=deltas)
    (folder / "scratch").mkdir()
    return model, writer


def written(model, writer, seed: int, base: bool = False):
    """Outputs after more steps."""
    train(model, 3, seed=seed)
    writer.write(base=base)
    return outputs(model)


def followed(rank, world_size, device, folder: Path, rows: str | None, knows: bool) -> None:
    near = 0.0 if rows is None else 2e-2
    model, writer = begun(folder, device, rows, knows)
    served = serving.load(folder / "model")
    arguments = {"every": None, "process": True, "scratch": folder / "scratch"}
    follower = serving.follow(served, folder / "chain", **arguments)
    assert_served(served, outputs(model), near)
    assert served.freshness().number == (None if knows else 0)
    unknown = served.counters()["ebc.embedding_bags.user"]["unknown"]
    for number in (1, 2):
        want = written(model, writer, 1000 * number)
        assert follower.poll() == 1
        assert_served(served, want, near)
        freshness = served.freshness()
        assert (freshness.number, freshness.behind, freshness.is_following) == (number, 0, True)
        assert freshness.apply_seconds > 0
    assert served.counters()["ebc.embedding_bags.user"]["unknown"] > unknown  # erases ids
    assert follower.poll() == 0
    # A base, and a delta after it; then a second follower, which starts from the served version.
    written(model, writer, 3000, base=True)
    before = written(model, writer, 4000)
    assert follower.poll() == 2
    assert_served(served, before, near)
    want = written(model, writer, 5000)
    assert follower.poll() == 1
    follower.rollback()
    assert_served(served, before, near)
    assert served.freshness().number == 4
    assert os.listdir(folder / "scratch") == []
    follower = serving.follow(served, folder / "chain", **arguments)
    assert_served(served, want, near)
    want = written(model, writer, 6000)
    assert follower.poll() == 1
    assert_served(served, want, near)
    follower.stop()
    assert os.listdir(folder / "scratch") == []
    assert served.freshness().error is None


def polled(rank, world_size, device, folder: Path) -> None:
    model, writer = begun(folder, device)
    chain = folder / "chain"
    served = serving.load(folder / "model")
    # By default a polling thread leaves the work to another process.
    with pytest.raises(ValueError, match="every is -1"):
        serving.follow(served, chain, every=-1)
    assert type(serving.follow(served, chain, every=None)) is Follower
    served._follower.stop()
    served = serving.load(folder / "model")
    follower = serving.follow(served, chain, every=0.05)
    assert type(follower) is ProcessFollower
    want = written(model, writer, 1000)
    deadline = time.monotonic() + 120
    while served.freshness().number != 1 and time.monotonic() < deadline:
        assert served.freshness().error is None
        time.sleep(0.05)
    assert_served(served, want)
    follower.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_default(run_ranks, tmp_path):
    run_ranks(1, polled, tmp_path, timeout=400)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rows", "knows"), [(None, True), ("int8", False)])
def test_followed(rows, knows, run_ranks, tmp_path):
    run_ranks(1, followed, tmp_path, rows, knows, timeout=400)


def failed(rank, world_size, device, folder: Path) -> None:
    model, writer = begun(folder, device)
    served = serving.load(folder / "model")
    arguments = {"every": None, "process": True, "scratch": folder / "scratch"}
    chain = folder / "chain"
    follower = serving.follow(served, chain, **arguments)
    before = outputs(model)
    want = written(model, writer, 1000)
    # The process is killed.
    os.kill(follower._process.pid, signal.SIGKILL)
    assert follower.poll() == 0
    assert "has ended with status -9" in served.freshness().error
    assert not served.freshness().is_following
    assert_served(served, before)
    # The disk has no room for a version.
    with pytest.raises(ValueError, match="File too large"), limited_files(100):
        serving.follow(served, chain, **arguments)
    assert_served(served, before)
    assert os.listdir(folder / "scratch") == []
    # The chain is whole again.
    follower = serving.follow(served, chain, **arguments)
    assert_served(served, want)
    follower.stop()
    # The folder has another model.
    serving.export(model, folder / "model", inputs=random_batch(0))
    with pytest.raises(ValueError, match="has been exported again: load the model again"):
        serving.follow(served, chain, **arguments)
    assert_served(served, want)


class limited_files:
    """Limits the size of files that processes write from now on."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_failed(run_ranks, tmp_path):
    run_ranks(1, failed, tmp_path, timeout=400)
