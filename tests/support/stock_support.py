"""Skips tests that need features which stock tables lack on some GPUs or FBGEMM builds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.ranks import RankError

#: FBGEMM's complete error message, and the reason to skip the test.
_REASONS = (
    (
        ("device kernel image is invalid",),
        "this build of FBGEMM has no such kernel for this GPU",
    ),
    (
        ("sparse_block_bucketize_features.cu", "grid.x value 0"),
        "FBGEMM's row-wise exchange takes no batch without samples on a GPU",
    ),
    (
        ("batch_index_select_dim0 supports only either float or half",),
        "TorchRec puts bags of features with batch sizes of their own together in fp32 or fp16 on "
        "a GPU",
    ),
)


@contextmanager
def skip_unsupported_by_stock() -> Iterator[None]:
    """Skips the test if a kernel of FBGEMM that the stock tables need can't run."""
    try:
        yield
    except RankError as error:
        for signs, reason in _REASONS:
            if all(sign in str(error) for sign in signs):
                pytest.skip(reason)
        raise
