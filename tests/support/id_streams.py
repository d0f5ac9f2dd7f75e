"""Streams of distinct ids like in practice: in order, in strides, hashed, real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

_CRITEO = Path(__file__).parents[3] / "shared/data/criteo_clicks_60k.npz"

STREAMS = [
    "sequential",
    "negative",
    *(f"stride 2^{k}" for k in (1, 4, 8, 12, 16, 20, 24, 32, 40, 46)),
    "hashed",
    "two fields",
    "criteo",
]


def id_stream(name: str, n: int) -> Tensor:
    """Returns the first ``n`` distinct ids of a stream; skips the test if its data is missing."""
    index = torch.arange(n)
    if name == "sequential":
        return index
    if name == "negative":
        return -1 - index
    if name.startswith("stride 2^"):
        return index << int(name.removeprefix("stride 2^"))
    if name == "hashed":
        generator = torch.Generator().manual_seed(11)
        ids = torch.randint(-(2**63), 2**63 - 1, (n + 100,), generator=generator)
        return ids.unique()[torch.randperm(n, generator=generator)]
    if name == "two fields":  # a feature's number in the upper bits, its values in the lower bits
        return (index % 64 << 48) | index // 64
    if name == "criteo":
        if not _CRITEO.exists():
            pytest.skip(f"needs {_CRITEO.name} beside the project")
        np = pytest.importorskip("numpy")
        ids = torch.from_numpy(np.unique(np.load(_CRITEO)["cat"]))
        generator = torch.Generator().manual_seed(11)
        ids = ids[torch.randperm(len(ids), generator=generator)][:n]
        assert len(ids) == n, f"the file has only {len(ids)} distinct ids"
        return ids
    raise ValueError(name)
