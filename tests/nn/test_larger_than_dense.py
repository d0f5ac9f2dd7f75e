"""A Tensor-Train module warns if its cores are larger than a dense table."""

from __future__ import annotations

import warnings

import pytest

from torchrec_hkv import TTEmbeddingBag
from torchrec_hkv.nn import TableBatchedTTEmbeddingBag
from torchrec_hkv.tensor_train import make_shape


def test_one_table():
    with pytest.warns(UserWarning, match=r"its cores take .* dense rows of 16 would take 320,000"):
        TTEmbeddingBag(5000, 16, tt_ranks=64)


def test_several_tables():
    shapes = [make_shape(5000, 16, ranks=rank) for rank in (8, 64)]
    with pytest.warns(UserWarning, match="Tensor-Train table 'table_1' is no smaller") as caught:
        TableBatchedTTEmbeddingBag(shapes)
    assert not any("table_0" in str(each.message) for each in caught)


def test_a_smaller_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TTEmbeddingBag(5000, 16, tt_ranks=8)
