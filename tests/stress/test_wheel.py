"""A wheel of ``make wheel``, installed in a fresh environment, runs README's quickstart.

    make wheel
    TORCHREC_HKV_WHEEL=dist/torchrec_hkv-0.1.0-....whl pytest tests/stress/test_wheel.py

The environment has the wheel by itself; torch, TorchRec and FBGEMM are those of the Python that
runs the test, so that nothing is downloaded. No compiler is on the path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.code_blocks import code_blocks

ROOT = Path(__file__).parents[2]
WHEEL = os.environ.get("TORCHREC_HKV_WHEEL", "")
pytestmark = pytest.mark.skipif(not WHEEL, reason="TORCHREC_HKV_WHEEL names no wheel")
END_OF_RANK = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
# Rows of a table that is trained, and evicts.
TRAIN = """
import torch
from torchrec_hkv import _C, HierarchicalHashEmbedding, HKVAdamOptimizer

torch.manual_seed(0)
embedding = HierarchicalHashEmbedding(embedding_dim=20, max_capacity=1000)
optimizer = HKVAdamOptimizer([embedding], lr=0.01)
for _ in range(20):
    embedding(torch.randint(-3000, 3000, (500,))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
rows = embedding.eval()(torch.arange(-3000, 3000)).detach()
print(_C.__file__)
print(embedding.counters(), rows.view(torch.int32).sum(dtype=torch.int64).item())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The Python of an environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    made = folder / "bin" / "python"
    command = [str(made), "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*command, str(Path(WHEEL).resolve())], check=True, env=variables)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return made


def run(python: Path, folder: Path, *arguments: str, **variables: str) -> str:
    environment = {"PATH": str(folder), "HOME": str(folder), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [str(python), "-W", "ignore", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tag():
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_2_\d+_x86_64", Path(WHEEL).name)
    with zipfile.ZipFile(WHEEL) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    assert not [name for name in names if "libtorch" in name or "libc10" in name]
    assert re.search(r"^Requires-Dist: torch==2\.\d+\.\*$", text, re.MULTILINE)


def test_quickstart(python, tmp_path):
    (quickstart,) = (b for b in code_blocks(ROOT / "README.md") if b.language == "python")
    (tmp_path / "quickstart.py").write_text(quickstart.code + END_OF_RANK)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert "hkv" in run(python, tmp_path, *launcher, "quickstart.py")


def test_both_variants_give_the_same_bits(python, tmp_path):
    shown = {}
    for variant in ("v2", "v3"):
        output = run(python, tmp_path, "-c", TRAIN, TORCHREC_HKV_CPU_VARIANT=variant)
        path, shown[variant] = output.splitlines()[-2:]
        assert ("_v3" in path) == (variant == "v3")
        assert str(python.parents[1]) in path
    assert shown["v2"] == shown["v3"]
