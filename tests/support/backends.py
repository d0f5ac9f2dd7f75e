"""The backends that tests of TorchRec's side run on: the toy, and one of the package."""

from __future__ import annotations

from tests.support import toy_backend

toy_backend.install()

BACKENDS = ["toy", "hkv"]
