"""Standalone embedding modules and their optimizers; TorchRec is not required."""

from torchrec_hkv.nn.embedding import HierarchicalHashEmbedding, MultiTableHKVEmbedding
from torchrec_hkv.nn.optimizers import (
    HKVAdagrad,
    HKVAdamOptimizer,
    HKVOptimizer,
    HKVSparseAdam,
)
from torchrec_hkv.nn.tt_embedding_bag import TTEmbeddingBag
from torchrec_hkv.nn.tt_tables import OptimType, TableBatchedTTEmbeddingBag

__all__ = [
    "HKVAdagrad",
    "HKVAdamOptimizer",
    "HKVOptimizer",
    "HKVSparseAdam",
    "HierarchicalHashEmbedding",
    "MultiTableHKVEmbedding",
    "OptimType",
    "TTEmbeddingBag",
    "TableBatchedTTEmbeddingBag",
]
