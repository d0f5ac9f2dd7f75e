"""Tensor-Train modules refuse bad arguments at construction, in one sentence."""

from __future__ import annotations

import math

import pytest

from torchrec_hkv import OptimType, TTEmbeddingBag
from torchrec_hkv.nn import TableBatchedTTEmbeddingBag
from torchrec_hkv.tensor_train import TTShape

SHAPE = TTShape(30, 4, (6, 5), (2, 2), (3,))
NO_FLAG = [1, 0, None, "yes", math.nan]
COMMON = [
    *(
        ({"learning_rate": v}, "learning_rate is")
        for v in (True, -1, math.nan, math.inf, "1", b"1")
    ),
    *(({"eps": v}, "eps is") for v in (True, 0, -1, math.nan, math.inf, "1", None)),
    *(({"sparse": value}, "sparse is .* True or False") for value in NO_FLAG),
    *(({"strict": value}, "strict is .* True or False") for value in NO_FLAG),
    ({"mode": "max"}, "mode is 'max', but must be 'sum' or 'mean'"),
    ({"optimizer": "sgd"}, "optimizer is 'sgd', but must be one of OptimType.SGD"),
    ({"weight_dist": "zeros"}, "distribution is 'zeros'"),
    ({"precision": "fp16"}, "precision is 'fp16'"),
]


@pytest.mark.parametrize("optimizer", [OptimType.SGD, OptimType.ADAGRAD])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        *COMMON,
        *(({"use_cache": value}, "use_cache is .* True or False") for value in NO_FLAG),
        *(({"include_last_offset": v}, "include_last_offset is .* True or") for v in NO_FLAG),
        ({"tt_ranks": 0}, "ranks has 0"),
        ({"tt_ranks": [0]}, "ranks has 0"),
        ({"num_embeddings": 0}, "num_embeddings has 0"),
        ({"embedding_dim": -8}, "embedding_dim has -8"),
        ({"num_cores": 5}, "number of cores is 5"),
        ({"hashtbl_size": 0}, "hashtbl_size 0 and .* but use_cache is False"),
        ({"cache_size": 5}, "cache_size is 5, .* but use_cache is False"),
        ({"cache_populate_every": 0}, "cache_populate_every 0, but use_cache is False"),
        ({"use_cache": True, "cache_size": 0}, "the cache has 0 rows, but must have 1 to 100"),
        ({"use_cache": True, "cache_size": 101}, "the cache has 101 rows"),
        ({"use_cache": True, "cache_size": 5, "hashtbl_size": 4}, "counted for 4 ids, but must"),
        ({"use_cache": True, "cache_size": 5, "hashtbl_size": 1 << 64}, "at most 1099511627776"),
        ({"use_cache": True, "cache_size": 5, "cache_populate_every": 0}, "is 0, but must be Non"),
    ],
)
def test_one_table(arguments, match, optimizer):
    with pytest.raises(ValueError, match=match):
        TTEmbeddingBag(
            **{
                "num_embeddings": 100,
                "embedding_dim": 8,
                "tt_ranks": 4,
                "optimizer": optimizer,
                **arguments,
            }
        )


@pytest.mark.parametrize("name", ["num_embeddings", "embedding_dim", "tt_ranks", "cache_size"])
@pytest.mark.parametrize("value", [True, 2.5, "8"])
def test_types_of_one_table(name, value):
    with pytest.raises(TypeError, match=r"(has|is) .*, but must be"):
        TTEmbeddingBag(**{"num_embeddings": 100, "embedding_dim": 8, "tt_ranks": 4, name: value})


@pytest.mark.parametrize(("arguments", "match"), COMMON)
def test_several_tables(arguments, match):
    with pytest.raises(ValueError, match=match):
        TableBatchedTTEmbeddingBag([SHAPE], **arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        *(({"shapes": v}, "shapes are .* sequence of TTShape") for v in (SHAPE, 3, "x", [1])),
        *(
            ({"feature_tables": v}, "feature_tables are .* sequence of integers")
            for v in (0, "0", [0.0], [True], [None])
        ),
    ],
)
def test_types_of_several_tables(arguments, match):
    with pytest.raises(TypeError, match=match):
        TableBatchedTTEmbeddingBag(**{"shapes": [SHAPE], **arguments})
