"""Checkpoints of sharded models.

Hash tables have files of their own. :mod:`torch.distributed.checkpoint` writes everything else.
Modules that need TorchRec are imported on first use, because :mod:`torchrec_hkv.serving` reads
checkpoints without TorchRec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchrec_hkv.write_behind import SaveHandle

if TYPE_CHECKING:
    from torchrec_hkv.checkpoint.compaction import compact
    from torchrec_hkv.checkpoint.deltas import DeltaWriter
    from torchrec_hkv.checkpoint.digests import digest
    from torchrec_hkv.checkpoint.model_load import load
    from torchrec_hkv.checkpoint.model_save import save
    from torchrec_hkv.checkpoint.resharding import reshard
    from torchrec_hkv.checkpoint.rows import export_rows, import_rows

_MODULES = {
    "DeltaWriter": "deltas",
    "compact": "compaction",
    "digest": "digests",
    "export_rows": "rows",
    "import_rows": "rows",
    "load": "model_load",
    "reshard": "resharding",
    "save": "model_save",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("torchrec_hkv.needs_torchrec")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "DeltaWriter",
    "SaveHandle",
    "compact",
    "digest",
    "export_rows",
    "import_rows",
    "load",
    "reshard",
    "save",
]
