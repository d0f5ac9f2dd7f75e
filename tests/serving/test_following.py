"""A served model follows its trainer: after every delta its outputs equal the trainer's."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.served_models import SEEDS, make_served, outputs_of, random_batch, train
from torchrec_hkv import checkpoint, serving

STEPS = 3


def outputs(model) -> list[dict[str, torch.Tensor]]:
    """Outputs of the trainer's model, for all ranks."""
    return [outputs_of(model, seed, 2 + seed) for seed in SEEDS]


def assert_served(
    model: serving.ServingModel, want: list[dict[str, torch.Tensor]], near: float = 0
):
    for seed, its in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))
        for key, value in its.items():
            torch.testing.assert_close(got[key], value, rtol=near, atol=near)


def followed(rank, world_size, device, folder: Path, sharding: str, rows: str | None, knows: bool):
    model = make_served(world_size, device, sharding)
    train(model, STEPS)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    writer.write()
    deltas = folder / "chain" if knows else None
    serving.export(model, folder / "model", rows, inputs=random_batch(0), deltas=deltas)
    near = {None: 0.0 if world_size == 1 else 1e-6, "int8": 2e-2}[rows]
    # One model follows each delta, and another one starts at the end.
    served = serving.load(folder / "model")
    follower = serving.follow(served, folder / "chain", every=None)
    assert_served(served, outputs(model), near)
    erased = 0
    for step in range(3):
        train(model, STEPS, seed=1000 + 10 * step)
        writer.write()
        want = outputs(model)
        assert follower.poll() == 1
        assert_served(served, want, near)
        assert served.freshness().number == step + 1
        assert served.freshness().behind == 0
        user = served._version.tables.tables[0]
        erased += int(user.changes.is_erased.sum())
    assert erased > 0
    late = serving.load(folder / "model")
    assert late.freshness().number is None
    serving.follow(late, folder / "chain", every=None)
    assert_served(late, want, near)
    # A base, and a delta after it.
    writer.write(base=True)
    train(model, STEPS, seed=2000)
    writer.write()
    want = outputs(model)
    assert follower.poll() == 2
    assert_served(served, want, near)
    assert follower.poll() == 0
    assert served.freshness().is_following
    if near == 0.0:
        before = want
        train(model, 1, seed=3000)
        writer.write()
        assert follower.poll() == 1
        follower.rollback()
        assert_served(served, before)
        assert served.freshness().number == 5
        assert served.freshness().behind == 1
        assert not served.freshness().is_following
        with pytest.raises(ValueError, match="no earlier version is kept"):
            follower.rollback()
        serving.follow(served, folder / "chain", every=None)  # once more
        assert_served(served, outputs(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "rows", "knows"),
    [
        ("table_wise", None, True),
        ("row_wise", "int8", False),
    ],
)
def test_followed(sharding, rows, knows, run_ranks, tmp_path):
    run_ranks(1, followed, tmp_path, sharding, rows, knows)


@pytest.mark.slow
def test_two_ranks(run_ranks, tmp_path):
    run_ranks(2, followed_on_two, tmp_path)


def followed_on_two(rank, world_size, device, folder: Path):
    """Columns of a table on both ranks."""
    model = make_served(world_size, device, "column_wise")
    train(model, STEPS)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    writer.write()
    serving.export(model, folder / "model", inputs=random_batch(0))
    served = serving.load(folder / "model")
    follower = serving.follow(served, folder / "chain", every=None)
    assert_served(served, outputs(model))
    train(model, STEPS, seed=1000)
    writer.write()
    assert follower.poll() == 1
    assert_served(served, outputs(model))


def read_while_applied(rank, world_size, device, folder: Path):
    """No call of a reader sees a mix of two versions."""
    model = make_served(world_size, device)
    train(model, 1)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    writer.write()
    serving.export(model, folder / "model", inputs=random_batch(0), deltas=folder / "chain")
    served = serving.load(folder / "model")
    batch = random_batch(7, 5)
    seen: list[dict[str, torch.Tensor]] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.append({key: value.clone() for key, value in served(*batch).items()})

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    versions = [outputs_of(model, 7, 5)]
    follower = serving.follow(served, folder / "chain", every=0.01, process=False)
    try:
        for step in range(6):
            train(model, 1, seed=100 + step)
            writer.write()
            versions.append(outputs_of(model, 7, 5))
        while served.freshness().number != 6:
            assert served.freshness().error is None
            ended.wait(0.01)
    finally:
        ended.set()
        for reader in readers:
            reader.join()
        follower.stop()
        sys.setswitchinterval(interval)

    def number(its: dict[str, torch.Tensor]) -> int:
        same = [all(torch.equal(its[key], version[key]) for key in its) for version in versions]
        return same.index(True)  # raises if there is none

    numbers = {number(its) for its in seen}
    assert len(numbers) > 1, numbers
    assert len(seen) > 20


@pytest.mark.slow
def test_read_while_applied(run_ranks, tmp_path):
    run_ranks(1, read_while_applied, tmp_path)
