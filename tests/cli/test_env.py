"""``torchrec-hkv env``."""

import json
import platform

import torch

from torchrec_hkv import _C
from torchrec_hkv.cli import main


def test_it_says_what_is_installed(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    assert _C.__file__ in text
    assert ("CUDA kernels    built" in text) == _C.has_cuda


def test_json(capsys):
    assert main(["env", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["versions"]["python"] == platform.python_version()
    assert content["versions"]["torch"] == torch.__version__
    assert "hkv" in content["backends"]
    assert content["kernels"] == {"cpu": True, "cuda": _C.has_cuda}
    assert len(content["gpus"]) == torch.cuda.device_count()
    assert all(gpu["runs_kernels"] for gpu in content["gpus"]) or not _C.has_cuda
    assert ("why_no_cuda" in content) != _C.has_cuda
