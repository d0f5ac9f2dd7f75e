"""Rows by id of a DMPCollection: a group exports its replica's rows, and imports reach all
groups."""

from __future__ import annotations

import pytest
import torch

from tests.support.two_dimensional import (
    configs,
    constraints,
    make_collection,
    model_contents,
    random_batch,
)
from torchrec_hkv import checkpoint


def _rows(rank, world_size, device):
    model = make_collection(2, world_size, device, configs(), constraints())
    for step in range(3):
        model(random_batch(rank, step).to(device)).square().mean().backward()
    before = _exported(model)
    model.sync()
    after = _exported(model)
    ids = torch.tensor(sorted(after))[:10]
    new = torch.cat([ids, torch.tensor([7, -7])])
    checkpoint.import_rows(model, "hash", [(new, torch.full((12, 4), 3.0))])
    imported = _exported(model)
    assert all(imported[id_] == [3.0] * 4 for id_ in new.tolist())
    model(random_batch(rank, 9).to(device)).square().mean().backward()
    model.sync()
    with pytest.raises(ValueError, match=r"'ebc\.embedding_bags\.stock' is a stock table of a DMP"):
        next(checkpoint.export_rows(model, "stock"))
    return before, after, model_contents(model)


def _exported(model):
    return {
        id_: row
        for ids, rows in checkpoint.export_rows(model, "hash", batch=7)
        for id_, row in zip(ids.tolist(), rows.tolist(), strict=True)
    }


def test_out_and_in(run_ranks):
    of_ranks = run_ranks(4, _rows)
    befores, afters, ends = zip(*of_ranks, strict=True)
    assert befores[0] == befores[2] != befores[1] == befores[3]
    assert all(after == afters[0] for after in afters)
    assert set(afters[0]) == set(befores[0]) | set(befores[1])
    assert ends[0] == ends[1]
    assert ends[2] == ends[3]
