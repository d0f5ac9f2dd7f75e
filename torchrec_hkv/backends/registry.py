"""The backends known by name: what a table's ``compute_kernels`` may say besides TorchRec's own."""

from __future__ import annotations

import functools
import importlib

from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from torchrec_hkv.backends.protocol import Backend

_BACKENDS: dict[str, Backend] = {}

# Those of this package, which are there from the start.
_OWN = (("hkv", "HKVBackend"), ("tt", "TTBackend"))

_STOCK_KERNELS: frozenset[str] = frozenset(kernel.value for kernel in EmbeddingComputeKernel)


def register(backend: Backend) -> None:
    """Makes a backend known under its name.

    Args:
        backend: one object for the whole process; TorchRec's side asks it for every table.

    Raises:
        ValueError: the name is taken, by another backend or by a compute kernel of TorchRec's.
    """
    _add_own()
    _add(backend)


def _add(backend: Backend) -> None:
    if backend.name in _STOCK_KERNELS:
        raise ValueError(
            f"A backend can't be named {backend.name!r}: that is a compute kernel of TorchRec's."
        )
    if backend.name in _BACKENDS:
        raise ValueError(
            f"A backend named {backend.name!r} is already registered: registered are {names()}."
        )
    _BACKENDS[backend.name] = backend


def get(name: str) -> Backend:
    """The backend registered under a name.

    Raises:
        ValueError: no backend has this name.
    """
    _add_own()
    if name not in _BACKENDS:
        raise ValueError(f"No backend is named {name!r}: registered are {names()}.")
    return _BACKENDS[name]


def names() -> list[str]:
    """The names of the registered backends, sorted."""
    _add_own()
    return sorted(_BACKENDS)


@functools.cache
def _add_own() -> None:
    """Registers the backends of this package, once. Not when this module is imported: theirs import
    this one."""
    for module_name, class_name in _OWN:
        module = importlib.import_module(f"torchrec_hkv.backends.{module_name}")
        _add(getattr(module, class_name)())
