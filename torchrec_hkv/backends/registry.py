"""The backends by name. ``compute_kernels`` of a table's constraints may name any of them."""

from __future__ import annotations

import functools
import importlib

from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from torchrec_hkv.backends.protocol import Backend

_BACKENDS: dict[str, Backend] = {}

# The backends of this package, which are always registered.
_OWN = (("hkv", "HKVBackend"), ("tt", "TTBackend"))

_STOCK_KERNELS: frozenset[str] = frozenset(kernel.value for kernel in EmbeddingComputeKernel)


def register(backend: Backend) -> None:
    """Registers a backend under its name.

    Args:
        backend: one object for the whole process; it serves every table that names it.

    Raises:
        ValueError: a backend or a compute kernel of TorchRec already has this name.
    """
    _register_built_in()
    _add(backend)


def _add(backend: Backend) -> None:
    if backend.name in _STOCK_KERNELS:
        raise ValueError(
            f"A backend can't be named {backend.name!r}: this is the name of a compute kernel of "
            "TorchRec."
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
    _register_built_in()
    if name not in _BACKENDS:
        raise ValueError(f"No backend is named {name!r}: registered are {names()}.")
    return _BACKENDS[name]


def names() -> list[str]:
    """The names of the registered backends, sorted."""
    _register_built_in()
    return sorted(_BACKENDS)


@functools.cache
def _register_built_in() -> None:
    """Registers the backends of this package, once. It runs at first use, not at import, because
    their modules import this one."""
    for module_name, class_name in _OWN:
        module = importlib.import_module(f"torchrec_hkv.backends.{module_name}")
        _add(getattr(module, class_name)())
