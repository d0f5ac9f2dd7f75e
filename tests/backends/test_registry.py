"""The registry of backends: names are unique, and unknown ones are refused."""

from __future__ import annotations

import pytest

from tests.support import toy_backend
from tests.support.toy_backend import ToyBackend
from torchrec_hkv import backends, register_backend

toy_backend.install()


def test_a_registered_backend_is_found():
    assert backends.get("toy").name == "toy"
    assert "hkv" in backends.names()
    assert backends.names() == sorted(backends.names())


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"'toy' is already registered: registered are \["):
        register_backend(ToyBackend())


def test_names_of_stock_kernels_are_taken():
    class Fused(ToyBackend):
        name = "fused"

    with pytest.raises(ValueError, match="'fused': this is the name of a compute kernel"):
        register_backend(Fused())


def test_an_unknown_name_is_refused_with_those_known():
    with pytest.raises(ValueError, match=r"No backend is named 'hkw': registered are .*'hkv'"):
        backends.get("hkw")
