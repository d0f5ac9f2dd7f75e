"""What stock tables can't do on some GPUs, or in some builds of FBGEMM: tests beside them skip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.ranks import RankError

#: What FBGEMM's error says, all of it, and why the test is skipped.
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
def skip_what_stock_lacks() -> Iterator[None]:
    """Skips the test where a kernel of FBGEMM's, which the stock tables need, can't run."""
    try:
        yield
    except RankError as error:
        for signs, reason in _REASONS:
            if all(sign in str(error) for sign in signs):
                pytest.skip(reason)
        raise
