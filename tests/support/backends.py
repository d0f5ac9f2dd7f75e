"""The backends that tests of TorchRec's side run on: the toy, and those of the package."""

from __future__ import annotations

import pytest

from tests.support import toy_backend
from torchrec_hkv import backends

toy_backend.install()

BACKENDS = [
    "toy",
    pytest.param(
        "hkv",
        marks=pytest.mark.skipif("hkv" not in backends.names(), reason="hkv is not registered"),
    ),
]
