"""Tensor-Train tables: shapes, cores, lookup and training. Does not depend on TorchRec."""

from torchrec_hkv.tensor_train.decomposition import Decomposition, tt_svd
from torchrec_hkv.tensor_train.dense import dense_blocks, rows_of, to_dense
from torchrec_hkv.tensor_train.group import Pooling, Precision, TTGroup, check_precision
from torchrec_hkv.tensor_train.id_order import IdOrder, smoothed_means
from torchrec_hkv.tensor_train.initialization import TTDistribution, initial_cores
from torchrec_hkv.tensor_train.monitoring import (
    NormHistogram,
    effective_ranks,
    gradient_norms,
    row_norms,
    singular_values,
)
from torchrec_hkv.tensor_train.shapes import (
    TTShape,
    factor_dim,
    factor_rows,
    make_shape,
    max_ranks,
)

__all__ = [
    "Decomposition",
    "IdOrder",
    "NormHistogram",
    "Pooling",
    "Precision",
    "TTDistribution",
    "TTGroup",
    "TTShape",
    "check_precision",
    "dense_blocks",
    "effective_ranks",
    "factor_dim",
    "factor_rows",
    "gradient_norms",
    "initial_cores",
    "make_shape",
    "max_ranks",
    "row_norms",
    "rows_of",
    "singular_values",
    "smoothed_means",
    "to_dense",
    "tt_svd",
]
