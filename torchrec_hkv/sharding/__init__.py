"""TorchRec's side of a table: sharders, sharded modules, input distribution, lookups, kernels."""

from torchrec_hkv import needs_torchrec  # noqa: F401
from torchrec_hkv.sharding.accumulation import accumulate_gradients
from torchrec_hkv.sharding.caches import populate_caches
from torchrec_hkv.sharding.counters import table_counters
from torchrec_hkv.sharding.embedding import BackendEmbeddingCollection
from torchrec_hkv.sharding.embedding_bag import BackendEmbeddingBagCollection
from torchrec_hkv.sharding.epochs import get_epoch, set_epoch
from torchrec_hkv.sharding.parameter_sharding import BackendParameterSharding
from torchrec_hkv.sharding.sharders import (
    BackendEmbeddingBagCollectionSharder,
    BackendEmbeddingCollectionSharder,
    get_default_sharders,
)

__all__ = [
    "BackendEmbeddingBagCollection",
    "BackendEmbeddingBagCollectionSharder",
    "BackendEmbeddingCollection",
    "BackendEmbeddingCollectionSharder",
    "BackendParameterSharding",
    "accumulate_gradients",
    "get_default_sharders",
    "get_epoch",
    "populate_caches",
    "set_epoch",
    "table_counters",
]
