"""The backends for tests of the TorchRec integration: the toy backend, and one of the package."""

from __future__ import annotations

from tests.support import toy_backend

toy_backend.install()

BACKENDS = ["toy", "hkv"]
