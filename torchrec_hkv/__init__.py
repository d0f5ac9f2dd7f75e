"""Hash-table and other backends for TorchRec's embedding tables, chosen table by table."""

# Before there is a process group, or a default argument in it holds the group and its threads
# beyond destroy_process_group, and a thread that still has tensors when the interpreter ends aborts
# the process. TorchRec's apply_optimizer_in_backward would import it later.
import torch.distributed.optim  # noqa: F401

try:
    import torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torchrec_hkv needs TorchRec and FBGEMM, and there is no module {error.name!r}: install "
        "torchrec with fbgemm-gpu or fbgemm-gpu-cpu in the versions that README.md lists for this "
        "torch.",
        name=error.name,
    ) from None
else:
    from torchrec_hkv import cpu_variant

    cpu_variant.load()  # before another module imports the extension

from torchrec_hkv import checkpoint
from torchrec_hkv._version import __version__
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
    accumulate_gradients,
    get_default_sharders,
    get_epoch,
    set_epoch,
)

register_backend(HKVBackend())
register_backend(TTBackend())

__all__ = [
    "AgedLFU",
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
    "get_epoch",
    "register_backend",
    "set_epoch",
]
