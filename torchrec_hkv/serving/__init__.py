"""Serving of trained models: read-only tables, and the model's forward as one program.

:func:`export` needs TorchRec. Everything else needs neither TorchRec nor FBGEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrec_hkv.serving.following import Follower, follow
from torchrec_hkv.serving.keyed_ids import KeyedIds
from torchrec_hkv.serving.model import Freshness, ServingModel, load

if TYPE_CHECKING:
    from torchrec_hkv.serving.export_model import export

__all__ = ["Follower", "Freshness", "KeyedIds", "ServingModel", "export", "follow", "load"]


def __getattr__(name: str) -> Any:
    if name == "export":  # needs TorchRec, which a process that serves lacks
        import torchrec_hkv.serving.export_model as export_model

        return export_model.export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
