"""Kinds of tables: the protocol that each kind implements, and the registry of their names."""

from torchrec_hkv import needs_torchrec  # noqa: F401
from torchrec_hkv.backends.protocol import (
    Backend,
    BackendOptions,
    CachedLookup,
    DeviceCounters,
    GroupLookup,
    Kept,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
)
from torchrec_hkv.backends.registry import get, names, register

__all__ = [
    "Backend",
    "BackendOptions",
    "CachedLookup",
    "DeviceCounters",
    "GroupLookup",
    "Kept",
    "OptimizerSpec",
    "StorageBytes",
    "TableShard",
    "TensorSpec",
    "get",
    "names",
    "register",
]
