"""If a chain lacks something, following stops; the model continues to serve."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.served_models import make_served, outputs_of, random_batch, train
from torchrec_hkv import checkpoint, serving

FULL_DISK = """
import resource, sys
from torchrec_hkv import serving
model = serving.load(sys.argv[1])
follower = serving.follow(model, sys.argv[2], every=None, scratch=sys.argv[4])
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
import shutil, os
for name in sorted(os.listdir(sys.argv[3])):
    if not os.path.exists(os.path.join(sys.argv[2], name)):
        os.symlink(os.path.join(sys.argv[3], name), os.path.join(sys.argv[2], name))
os.remove(os.path.join(sys.argv[2], "deltas.json"))
os.symlink(os.path.join(sys.argv[3], "deltas.json"), os.path.join(sys.argv[2], "deltas.json"))
assert follower.poll() == 0
print(model.freshness().number, model.freshness().error, os.listdir(sys.argv[4]))
"""


def chains(rank, world_size, device, folder: Path) -> dict[str, list]:
    """A chain at its first delta and at its third, with the outputs of both; and one with another
    base."""
    model = make_served(world_size, device)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    writer.write()
    serving.export(model, folder / "model", inputs=random_batch(0), deltas=folder / "chain")
    for step in range(3):
        train(model, 2, seed=100 * step)
        writer.write()
        if step == 0:
            first = outputs_of(model, 1, 4)
            shutil.copytree(folder / "chain", folder / "first")
    shutil.copytree(folder / "chain", folder / "third")
    third = outputs_of(model, 1, 4)
    writer.write(base=True)
    return {"first": first, "third": third}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def a_file(folder: Path, pattern: str) -> Path:
    return next(path for path in sorted(folder.rglob(pattern)) if path.stat().st_size > 0)


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (lambda chain: shutil.rmtree(chain / "delta-000002"), "lacks checkpoint 2 of its chain"),
    (lambda chain: flip(chain / "delta-000002/chain.json"), "is damaged|is not JSON|damaged"),
    (lambda chain: flip(a_file(chain / "delta-000002/tables", "shard*")), "is damaged"),
    (lambda chain: flip(a_file(chain / "delta-000002/tables", "left*")), "is damaged"),
    (lambda chain: flip(a_file(chain / "delta-000002/tensors", "*.distcp")), "is damaged"),
    (lambda chain: a_file(chain / "delta-000002/tables", "shard*").unlink(), "can't be read"),
]


@pytest.mark.slow
def test_faults(run_ranks, tmp_path):
    want = run_ranks(1, chains, tmp_path)[0]
    for number, (damage, message) in enumerate(FAULTS):
        chain = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / "first", chain)
        model = serving.load(tmp_path / "model")
        follower = serving.follow(model, chain, every=None)
        shutil.rmtree(chain)
        shutil.copytree(tmp_path / "third", chain)
        damage(chain)
        assert follower.poll() == 0, number
        freshness = model.freshness()
        assert not freshness.is_following
        assert freshness.number == 1
        assert freshness.behind == 2
        with pytest.raises(AssertionError, match=message):  # the whole text, for failures
            raise AssertionError(freshness.error)
        got = model(*random_batch(1, 4))
        assert all(torch.equal(got[key], value) for key, value in want["first"].items())
        assert follower.poll() == 0
        with pytest.raises(ValueError, match=message):
            serving.follow(model, chain, every=None)
    # The chain is whole again.
    follower = serving.follow(model, tmp_path / "third", every=None)
    got = model(*random_batch(1, 4))
    assert all(torch.equal(got[key], value) for key, value in want["third"].items())

    (tmp_path / "scratch").mkdir()
    names = ("model", "first", "chain", "scratch")
    paths = [str(tmp_path / name) for name in names]
    done = subprocess.run([sys.executable, "-c", FULL_DISK, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The base, number 4, exceeds the disk; no part of it is left.
    told = r"1 \[Errno 27\] File too large: '\S+/scratch/\S+[./]table' \[\]\n"
    assert re.fullmatch(told, done.stdout), done.stdout


def another_model(rank, world_size, device, folder: Path) -> None:
    model = make_served(world_size, device)
    serving.export(model, folder / "model", inputs=random_batch(0))
    served = serving.load(folder / "model")
    assert served.freshness() == serving.Freshness(None, None, None, False, None, None)
    with pytest.raises(ValueError, match="every is 0, but must be positive"):
        serving.follow(served, folder / "chain", every=0)
    follower = serving.follow(served, folder / "chain", every=None)  # not there yet
    assert served.freshness().is_following
    with pytest.raises(ValueError, match="the model already follows"):
        serving.follow(served, folder / "other", every=None)
    with pytest.raises(ValueError, match=r"deltas is .*, which has no checkpoint of a DeltaWriter"):
        serving.export(model, folder / "new", inputs=random_batch(0), deltas=folder / "chain")
    checkpoint.DeltaWriter(model.module.ebc, folder / "chain").write()
    assert follower.poll() == 0
    assert "of another model" in served.freshness().error


@pytest.mark.slow
def test_another_model(run_ranks, tmp_path):
    run_ranks(1, another_model, tmp_path)
