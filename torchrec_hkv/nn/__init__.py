"""Embeddings and their optimizers as modules by themselves, without TorchRec."""

from torchrec_hkv.nn.tt_embedding_bag import TTEmbeddingBag
from torchrec_hkv.nn.tt_tables import OptimType, TableBatchedTTEmbeddingBag

__all__ = ["OptimType", "TTEmbeddingBag", "TableBatchedTTEmbeddingBag"]
