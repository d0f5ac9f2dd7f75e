"""Hash-table and other backends for TorchRec's embedding tables, chosen table by table."""

from torchrec_hkv._version import __version__
from torchrec_hkv.backends import register as register_backend
from torchrec_hkv.backends.hkv import HKVBackend, HKVOptions
from torchrec_hkv.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec_hkv.sharding import get_default_sharders

__all__ = [
    "EmbeddingShardingPlanner",
    "HKVOptions",
    "ParameterConstraints",
    "__version__",
    "get_default_sharders",
    "register_backend",
]

register_backend(HKVBackend())
