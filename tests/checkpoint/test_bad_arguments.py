"""Save and load refuse impossible arguments in one sentence; nothing changes."""

from __future__ import annotations

import os

import pytest

from tests.support.checkpoint_models import make_tables, model_contents, train
from torchrec_hkv import checkpoint

NUMBERS = [
    {"threads": 0},
    {"threads": -1},
    {"threads": 1.5},
    {"batch_bytes": 0},
    {"batch_bytes": -5},
    {"batch_bytes": "1 GiB"},
]


def _refusals(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    train(model, rank, device, range(2))
    checkpoint.save(folder / "good", model)
    before = model_contents(model, "adam"), sorted(os.listdir(folder))
    for numbers in NUMBERS:
        ((what, value),) = numbers.items()
        sentence = f"^{what} is {value!r}, but must be an integer, at least 1.$"
        with pytest.raises(ValueError, match=sentence):
            checkpoint.save(folder / "new", model, **numbers)
        with pytest.raises(ValueError, match=sentence):
            checkpoint.load(folder / "good", model, **numbers)
    for path in ("", "/", folder / ".."):
        with pytest.raises(ValueError, match=r"does not name a folder of its own"):
            checkpoint.save(path, model)
        with pytest.raises(ValueError, match=r"does not name a folder of its own"):
            checkpoint.load(path, model)
    return before == (model_contents(model, "adam"), sorted(os.listdir(folder)))


def test_impossible_arguments(run_ranks, tmp_path):
    assert run_ranks(1, _refusals, tmp_path) == [True]
