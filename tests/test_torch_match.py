"""If the extension was built for another torch, the import names the torch it needs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from torchrec_hkv import torch_match

IMPORT = """
import sys, types
built = types.ModuleType("torchrec_hkv._built_for")
built.TORCH, built.CUDA = {torch!r}, {cuda!r}
sys.modules[built.__name__] = built
import torchrec_hkv
"""


@pytest.mark.parametrize(
    ("built", "installed"),
    [
        (("2.11.0+cu130", "13.0"), ("2.11.1+cu130", "13.0")),
        (("2.11.0+cu130", "13.0"), ("2.11.0+cu132", "13.2")),
        (("2.13.0+cpu", None), ("2.13.1", "13.0")),
        (("2.13.0+cpu", None), ("2.13.0+cpu", None)),
        (("2.13.0", None), ("2.13.0a0+gitcf30153", None)),
    ],
)
def test_these_match(built, installed):
    assert torch_match.mismatch(*built, *installed) is None


@pytest.mark.parametrize(
    ("built", "installed", "sentence"),
    [
        (
            ("2.11.0+cu130", "13.0"),
            ("2.11.0+cpu", None),
            "torchrec_hkv was built for torch 2.11 for CUDA 13, but torch 2.11.0+cpu without CUDA "
            "is installed: install torch==2.11.* for CUDA 13, or build torchrec_hkv for this "
            "torch.",
        ),
        (
            ("2.11.0+cu130", "13.0"),
            ("2.11.0+cu128", "12.8"),
            "torchrec_hkv was built for torch 2.11 for CUDA 13, but torch 2.11.0+cu128 for CUDA "
            "12.8 is installed: install torch==2.11.* for CUDA 13, or build torchrec_hkv for this "
            "torch.",
        ),
        (
            ("2.1.0+cpu", None),
            ("2.11.0+cpu", None),
            "torchrec_hkv was built for torch 2.1, but torch 2.11.0+cpu without CUDA is installed: "
            "install torch==2.1.*, or build torchrec_hkv for this torch.",
        ),
    ],
)
def test_these_do_not(built, installed, sentence):
    assert torch_match.mismatch(*built, *installed) == sentence


@pytest.mark.slow
def test_the_import_says_so():
    program = IMPORT.format(torch="1.13.0", cuda="4.2")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    expected = "ImportError: torchrec_hkv was built for torch 1.13 for CUDA 4, but torch "
    assert last.startswith(expected)
    assert str(torch.__version__) in last


def test_the_record_of_this_build():
    try:
        from torchrec_hkv import _built_for
    except ImportError:
        pytest.skip("this build has no record")
    assert re.match(r"2\.\d+\.", _built_for.TORCH)
    torch_match.check()
