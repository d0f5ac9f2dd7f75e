"""Embeddings and their optimizers as modules by themselves, without TorchRec."""

from torchrec_hkv.nn.embedding import HierarchicalHashEmbedding, MultiTableHKVEmbedding
from torchrec_hkv.nn.optimizers import (
    HKVAdagrad,
    HKVAdamOptimizer,
    HKVOptimizer,
    HKVSparseAdam,
)

__all__ = [
    "HKVAdagrad",
    "HKVAdamOptimizer",
    "HKVOptimizer",
    "HKVSparseAdam",
    "HierarchicalHashEmbedding",
    "MultiTableHKVEmbedding",
]
