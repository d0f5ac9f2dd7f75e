"""Codes and scales of rows that are saved in 8 bits."""

import numpy as np
import torch

from torchrec_hkv.hash_table.files.shard_files import quantised


def test_equal_to_numpy(device_type):
    """The scale is the maximum divided by 127, rounded once, on each device."""
    rows = torch.randn(5000, 12) * torch.logspace(-20, 20, 5000)[:, None]
    rows[7] = 0
    codes, scales = quantised(rows.to(device_type))
    values = rows.numpy()
    expected = np.abs(values).max(axis=1) / np.float32(127)
    np.testing.assert_array_equal(scales.cpu().numpy(), expected)
    quotients = values / np.where(expected == 0, np.float32(1), expected)[:, None]
    np.testing.assert_array_equal(codes.cpu().numpy(), np.rint(quotients).astype(np.int8))
