"""TorchRec's side of a table: sharders, sharded modules, input distribution, lookups, kernels."""

from torchrec_hkv import needs_torchrec  # noqa: F401
from torchrec_hkv.sharding.modules.accumulation import accumulate_gradients
from torchrec_hkv.sharding.modules.caches import populate_caches
from torchrec_hkv.sharding.modules.counters import table_counters
from torchrec_hkv.sharding.modules.dmp_collection import DMPCollection
from torchrec_hkv.sharding.modules.embedding import BackendEmbeddingCollection
from torchrec_hkv.sharding.modules.embedding_bag import BackendEmbeddingBagCollection
from torchrec_hkv.sharding.modules.epochs import get_epoch, set_epoch
from torchrec_hkv.sharding.modules.sharders import (
    BackendEmbeddingBagCollectionSharder,
    BackendEmbeddingCollectionSharder,
    BackendFeatureProcessedEmbeddingBagCollectionSharder,
    get_default_sharders,
)
from torchrec_hkv.sharding.parameter_sharding import BackendParameterSharding

__all__ = [
    "BackendEmbeddingBagCollection",
    "BackendEmbeddingBagCollectionSharder",
    "BackendEmbeddingCollection",
    "BackendEmbeddingCollectionSharder",
    "BackendFeatureProcessedEmbeddingBagCollectionSharder",
    "BackendParameterSharding",
    "DMPCollection",
    "accumulate_gradients",
    "get_default_sharders",
    "get_epoch",
    "populate_caches",
    "set_epoch",
    "table_counters",
]
