"""Checksums equal those of zlib."""

import random
import zlib

import numpy as np
import pytest
import torch

from torchrec_hkv import _C, checksums
from torchrec_hkv.hash_table.files.block_files import host_memory


def test_equal_to_zlib():
    """Data of any length and alignment gives the checksum of zlib, from any initial value."""
    data = random.randbytes(5000)
    for size in [*range(300), *(random.randrange(300, 4900) for _ in range(100))]:
        begin, value = random.randrange(64), random.getrandbits(32)
        piece = memoryview(data)[begin : begin + size]
        assert checksums.crc32(piece, value) == zlib.crc32(piece, value)
        assert _C.crc32_by_tables(piece, value) == zlib.crc32(piece, value)


def test_in_pieces():
    data = random.randbytes(100_000)
    value = 0
    for piece in (data[:1], data[1:70], data[70:70_000], data[70_000:]):
        value = checksums.crc32(piece, value)
    assert value == zlib.crc32(data)


def test_of_tensors():
    """Checksums cover the bytes of any dtype."""
    tensor = torch.randn(1000, dtype=torch.float64)
    assert checksums.crc32(host_memory(tensor)) == zlib.crc32(tensor.numpy().tobytes())


def test_data_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="must be contiguous"):
        checksums.crc32(memoryview(np.arange(100, dtype=np.uint8))[::2])
