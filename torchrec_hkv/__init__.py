"""Hash-table and other backends for TorchRec's embedding tables, chosen table by table."""

from torchrec_hkv import checkpoint
from torchrec_hkv._version import __version__
from torchrec_hkv.backends import register as register_backend
from torchrec_hkv.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec_hkv.sharding import get_default_sharders

# TEMPORARY guard, until backends/hkv.py exists; then only the import and the registration stay.
try:
    from torchrec_hkv.backends.hkv import HKVBackend, HKVOptions
except ModuleNotFoundError as error:
    if error.name != "torchrec_hkv.backends.hkv":
        raise
else:
    register_backend(HKVBackend())

__all__ = [
    "EmbeddingShardingPlanner",
    "HKVOptions",
    "ParameterConstraints",
    "__version__",
    "checkpoint",
    "get_default_sharders",
    "register_backend",
]
