"""If a process is killed while it applies a base or a delta, the next one serves the newest
version."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.served_models import make_served, outputs_of, random_batch, train
from torchrec_hkv import checkpoint, serving

SERVER = """
import sys
from pathlib import Path
from torchrec_hkv import serving
model = serving.load(sys.argv[1])
Path(sys.argv[3], "started").touch()
while True:
    serving.follow(model, sys.argv[2], every=None, scratch=sys.argv[3]).rollback()
"""


def chained(rank, world_size, device, folder: Path):
    """A model, and a chain whose base and deltas are not applied yet."""
    model = make_served(world_size, device)
    serving.export(model, folder / "model", inputs=random_batch(0))
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    for step in range(3):
        train(model, 1, seed=100 * step)
        writer.write()
    return outputs_of(model, 1, 4)


@pytest.mark.slow
def test_killed(run_ranks, tmp_path):
    want = run_ranks(1, chained, tmp_path)[0]
    (scratch := tmp_path / "scratch").mkdir()
    arguments = [str(tmp_path / "model"), str(tmp_path / "chain"), str(scratch)]
    process = subprocess.Popen([sys.executable, "-c", SERVER, *arguments])
    ends = time.monotonic() + 200
    while not (scratch / "started").exists():
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.01)
    time.sleep(0.5)  # applies repeatedly
    assert process.poll() is None
    process.kill()
    process.wait()
    (scratch / "started").unlink()
    left = list(scratch.iterdir())
    model = serving.load(tmp_path / "model", verify=True)
    serving.follow(model, tmp_path / "chain", every=None, scratch=scratch)
    assert model.freshness().number == 2
    got = model(*random_batch(1, 4))
    assert all(torch.equal(got[key], value) for key, value in want.items())
    assert list(scratch.iterdir()) == left  # files of a base have no name once they are mapped
