"""A wheel from ``make wheel``, installed in a fresh environment, runs README's quickstart.

    make wheel
    TORCHREC_HKV_WHEEL=dist/torchrec_hkv-0.1.0+....whl pytest tests/stress/test_wheel.py

Only the wheel is installed there. torch, TorchRec and FBGEMM come from the Python that runs the
test, so that nothing is downloaded. No compiler or CUDA toolkit is on the path. A CUDA wheel runs
on the CPU too, and on GPUs if there are any.
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
import torch

from tests.support.code_blocks import code_blocks

ROOT = Path(__file__).parents[2]
WHEEL = os.environ.get("TORCHREC_HKV_WHEEL", "")
CUDA = re.search(r"\+torch2\.\d+\.cu\d+-", WHEEL) is not None
MAX_BYTES = 60e6  # of an unpacked extension
pytestmark = pytest.mark.skipif(not WHEEL, reason="TORCHREC_HKV_WHEEL names no wheel")
cuda_wheel = pytest.mark.skipif(not CUDA, reason="not a wheel for CUDA")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ON_GPU = 'torch.device("cuda", dist.get_rank())\ntorch.cuda.set_device(device)'
END_OF_RANK = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
# Rows of a table that trains and evicts.
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
# Reports whether an import of the wheel, or a table on a GPU, raises the expected error.
REFUSED = """
import torch
{change}
try:
    import torchrec_hkv
    torchrec_hkv.HashTable(dim=8, capacity=100, device="cuda")
except {error} as error:
    print(error)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The Python of an environment with the wheel installed."""
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


def test_tag_and_size():
    pattern = r"\+torch2\.\d+\.(cpu|cu\d+)-cp3\d+-cp3\d+-manylinux_2_\d+_x86_64"
    assert re.search(pattern, Path(WHEEL).name)
    with zipfile.ZipFile(WHEEL) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    libraries = {name: size for name, size in sizes.items() if ".so" in name}
    assert len(libraries) == (1 if CUDA else 2)  # no library of torch or CUDA
    assert all("/_C." in name for name in libraries)
    assert max(libraries.values()) <= MAX_BYTES
    assert re.search(r"^Requires-Dist: torch==2\.\d+\.\*$", text, re.MULTILINE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[cuda_wheel, on_gpu])])
def test_quickstart(python, tmp_path, device):
    (quickstart,) = (b for b in code_blocks(ROOT / "README.md") if b.language == "python")
    code, ranks = quickstart.code, 2
    if device == "cuda":
        ranks = min(2, torch.cuda.device_count())
        code = code.replace('"gloo"', '"nccl"').replace('torch.device("cpu")', ON_GPU)
        assert ON_GPU in code
        assert '"nccl")' in code
    (tmp_path / "quickstart.py").write_text(code + END_OF_RANK)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    assert "hkv" in run(python, tmp_path, *launcher, "quickstart.py")


@pytest.mark.skipif(CUDA, reason="a wheel for CUDA has one variant")
def test_both_variants_give_the_same_bits(python, tmp_path):
    shown = {}
    for variant in ("v2", "v3"):
        output = run(python, tmp_path, "-c", TRAIN, TORCHREC_HKV_CPU_VARIANT=variant)
        path, shown[variant] = output.splitlines()[-2:]
        assert ("_v3" in path) == (variant == "v3")
        assert str(python.parents[1]) in path
    assert shown["v2"] == shown["v3"]


@cuda_wheel
def test_it_has_the_cuda_kernels(python, tmp_path):
    program = "from torchrec_hkv import _C; print(_C.has_cuda, _C.__file__)"
    has_cuda, path = run(python, tmp_path, "-c", program).split()
    assert has_cuda == "True"
    assert str(python.parents[1]) in path


@cuda_wheel
@pytest.mark.parametrize("cuda", [None, "1.0"])
def test_a_torch_for_another_cuda_is_refused(python, tmp_path, cuda):
    program = REFUSED.format(change=f"torch.version.cuda = {cuda!r}", error="ImportError")
    output = run(python, tmp_path, "-c", program)
    present = "for CUDA 1.0" if cuda else "without CUDA"
    assert re.match(rf"torchrec_hkv was built for torch .* {present} is installed", output)


@cuda_wheel
def test_without_a_gpu(python, tmp_path):
    program = REFUSED.format(change="", error="ValueError")
    output = run(python, tmp_path, "-c", program, CUDA_VISIBLE_DEVICES="")
    assert output == "device is 'cuda', but torch sees no GPU: use 'cpu'.\n"
