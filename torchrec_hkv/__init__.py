"""Hash-table and other backends for TorchRec's embedding tables, chosen for each table.

Public names are imported on first use, because :mod:`torchrec_hkv.serving` also runs without
TorchRec.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch  # the extension needs its libraries

from torchrec_hkv import cpu_variant, torch_match
from torchrec_hkv._version import __version__

torch_match.check()  # before imports that take seconds

if importlib.util.find_spec("torchrec") is not None:
    # Must be imported before there is a process group. Otherwise a default argument in the module
    # keeps the group and its threads alive after destroy_process_group, and a thread that holds
    # tensors when the interpreter exits aborts the process. TorchRec's apply_optimizer_in_backward
    # would import the module later. The import takes two seconds, which processes that serve
    # without TorchRec save.
    import torch.distributed.optim  # noqa: F401

cpu_variant.load()  # before another module imports the extension

if TYPE_CHECKING:
    from torchrec_hkv import checkpoint, serving
    from torchrec_hkv.backends import register as register_backend
    from torchrec_hkv.backends.hkv import HKVBackend, HKVOptions
    from torchrec_hkv.backends.tt import TTBackend, TTOptions
    from torchrec_hkv.hash_table import AgedLFU, HashTable
    from torchrec_hkv.nn import (
        HierarchicalHashEmbedding,
        HKVAdagrad,
        HKVAdamOptimizer,
        HKVOptimizer,
        HKVSparseAdam,
        MultiTableHKVEmbedding,
        OptimType,
        TTEmbeddingBag,
    )
    from torchrec_hkv.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec_hkv.sharding import (
        DMPCollection,
        accumulate_gradients,
        get_default_sharders,
        get_epoch,
        set_epoch,
    )

# For each public name: its module, and its name in the module; None for the module itself.
_PLACES: dict[str, tuple[str, str | None]] = {
    "AgedLFU": ("hash_table", "AgedLFU"),
    "DMPCollection": ("sharding", "DMPCollection"),
    "EmbeddingShardingPlanner": ("planner", "EmbeddingShardingPlanner"),
    "HKVAdagrad": ("nn", "HKVAdagrad"),
    "HKVAdamOptimizer": ("nn", "HKVAdamOptimizer"),
    "HKVBackend": ("backends.hkv", "HKVBackend"),
    "HKVOptimizer": ("nn", "HKVOptimizer"),
    "HKVOptions": ("backends.hkv", "HKVOptions"),
    "HKVSparseAdam": ("nn", "HKVSparseAdam"),
    "HashTable": ("hash_table", "HashTable"),
    "HierarchicalHashEmbedding": ("nn", "HierarchicalHashEmbedding"),
    "MultiTableHKVEmbedding": ("nn", "MultiTableHKVEmbedding"),
    "OptimType": ("nn", "OptimType"),
    "ParameterConstraints": ("planner", "ParameterConstraints"),
    "TTBackend": ("backends.tt", "TTBackend"),
    "TTEmbeddingBag": ("nn", "TTEmbeddingBag"),
    "TTOptions": ("backends.tt", "TTOptions"),
    "accumulate_gradients": ("sharding", "accumulate_gradients"),
    "checkpoint": ("checkpoint", None),
    "get_default_sharders": ("sharding", "get_default_sharders"),
    "get_epoch": ("sharding", "get_epoch"),
    "register_backend": ("backends", "register"),
    "serving": ("serving", None),
    "set_epoch": ("sharding", "set_epoch"),
}


# Packages and modules that are imported as attributes on first use.
_MODULES = (
    "backends",
    "hash_table",
    "integrations",
    "metrics",
    "nn",
    "planner",
    "replay",
    "segments",
    "sharding",
    "tensor_train",
)


def __getattr__(name: str) -> Any:
    if name not in _PLACES and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _PLACES.get(name, (name, None))
    module = importlib.import_module(f"{__name__}.{module_name}")
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})


__all__ = [
    "AgedLFU",
    "DMPCollection",
    "EmbeddingShardingPlanner",
    "HKVAdagrad",
    "HKVAdamOptimizer",
    "HKVBackend",
    "HKVOptimizer",
    "HKVOptions",
    "HKVSparseAdam",
    "HashTable",
    "HierarchicalHashEmbedding",
    "MultiTableHKVEmbedding",
    "OptimType",
    "ParameterConstraints",
    "TTBackend",
    "TTEmbeddingBag",
    "TTOptions",
    "__version__",
    "accumulate_gradients",
    "checkpoint",
    "get_default_sharders",
    "get_epoch",
    "register_backend",
    "serving",
    "set_epoch",
]
