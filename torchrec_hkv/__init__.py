"""Hash-table and other backends for TorchRec's embedding tables, chosen table by table."""

# Before there is a process group, or a default argument in it holds the group and its threads
# beyond destroy_process_group, and a thread that still has tensors when the interpreter ends aborts
# the process. TorchRec's apply_optimizer_in_backward would import it later.
import torch.distributed.optim  # noqa: F401

from torchrec_hkv import checkpoint
from torchrec_hkv._version import __version__
from torchrec_hkv.backends import register as register_backend
from torchrec_hkv.backends.hkv import HKVBackend, HKVOptions
from torchrec_hkv.backends.tt import TTBackend, TTOptions
from torchrec_hkv.hash_table import HashTable
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
from torchrec_hkv.sharding import accumulate_gradients, get_default_sharders

register_backend(HKVBackend())
register_backend(TTBackend())

__all__ = [
    "EmbeddingShardingPlanner",
    "HKVAdagrad",
    "HKVAdamOptimizer",
    "HKVOptimizer",
    "HKVOptions",
    "HKVSparseAdam",
    "HashTable",
    "HierarchicalHashEmbedding",
    "MultiTableHKVEmbedding",
    "OptimType",
    "ParameterConstraints",
    "TTEmbeddingBag",
    "TTOptions",
    "__version__",
    "accumulate_gradients",
    "checkpoint",
    "get_default_sharders",
    "register_backend",
]
