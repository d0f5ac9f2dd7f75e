"""Name, requirements and content of a wheel for other machines; nothing is compiled."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch
from torch.utils import cpp_extension

from torchrec_hkv import __version__

ROOT = Path(__file__).parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def setup(monkeypatch):
    """Runs setup.py. Returns its arguments to setuptools, and its names."""

    def run(cuda: str | None, release: bool):
        passed = {}
        monkeypatch.setattr(setuptools, "setup", lambda **arguments: passed.update(arguments))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/usr/local/cuda" if cuda else None)
        monkeypatch.setenv("TORCHREC_HKV_CUDA", "1" if cuda else "0")
        monkeypatch.setenv("TORCHREC_HKV_RELEASE", "1" if release else "0")
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
        monkeypatch.delenv("TORCHREC_HKV_CPU_ARCH", raising=False)
        monkeypatch.chdir(ROOT)
        names = runpy.run_path("setup.py")
        return passed, names

    return run


@pytest.mark.parametrize(("cuda", "name"), [("13.0", "cu130"), (None, "cpu")])
def test_a_release_names_its_torch(setup, cuda, name):
    passed, _ = setup(cuda, release=True)
    assert passed["version"] == f"{__version__}+torch{MINOR}.{name}"
    assert passed["install_requires"] == [f"torch=={MINOR}.*"]


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_other_builds_have_the_plain_version(setup, cuda):
    passed, _ = setup(cuda, release=False)
    assert passed["version"] == __version__
    assert "<" in passed["install_requires"][0]


def test_a_cuda_release(setup):
    passed, names = setup("13.0", release=True)
    (extension,) = passed["ext_modules"]
    assert "-march=x86-64-v2" in extension.extra_compile_args["cxx"]
    assert {"cudart", "c10_cuda", "torch_cuda"} <= set(extension.libraries)
    record = {}
    exec(names["built_for"](), record)
    assert (record["CUDA"], record["CUDA_ARCHS"]) == ("13.0", "8.0;9.0;10.0")
    assert record["TORCH"] == torch.__version__


def test_the_description(tmp_path):
    wheel = tmp_path / "torchrec_hkv-1-py3.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torchrec_hkv/_C.so", bytes(2_340_000))
        record = "TORCH = '2.11.0'\nCUDA = '13.0'\nCUDA_ARCHS = '8.0;9.0'\n"
        archive.writestr("torchrec_hkv/_built_for.py", record)
        archive.writestr("torchrec_hkv-1.dist-info/METADATA", "Requires-Dist: torch==2.11.*\n")
    describe = runpy.run_path(str(ROOT / "tools" / "build_wheel.py"))["describe"]
    assert describe(wheel).splitlines() == [
        "torchrec_hkv-1-py3.whl: 2.3 MB",
        "  torchrec_hkv/_C.so: 2.3 MB unpacked",
        "  CUDA 13.0, sm 8.0;9.0",
        "  Requires-Dist: torch==2.11.*",
    ]


def test_what_is_missing_is_said_before_anything_is_built(tmp_path, monkeypatch):
    build = runpy.run_path(str(ROOT / "tools" / "build_wheel.py"))["build"]
    monkeypatch.setitem(build.__globals__, "NEEDED", ["torch", "no_such_package"])
    monkeypatch.setitem(build.__globals__, "TOOLS", ["no_such_program"])
    with pytest.raises(SystemExit, match="lacks no_such_package, no_such_program: install them"):
        build(tmp_path / "dist")
    assert not (tmp_path / "dist").exists()
