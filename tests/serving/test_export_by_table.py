"""Row formats and unknown ids, for all tables and by table."""

from __future__ import annotations

import pytest
import torch

from tests.support.served_models import BAGS, SEEDS, SEQUENCE, exported, random_batch
from torchrec_hkv import serving
from torchrec_hkv.serving.manifest import ServingManifest


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["int8", "int4"])
def test_row_formats(rows, run_ranks, tmp_path):
    want = run_ranks(1, exported, tmp_path / "model", "table_wise", {"rows": rows})[0]
    model = serving.load(tmp_path / "model")
    near = {"int8": 2e-2, "int4": 0.3}[rows]
    for seed, outputs in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))["made_of"]
        assert not torch.equal(got, outputs["made_of"])
        torch.testing.assert_close(got, outputs["made_of"], rtol=near, atol=near)
    formats = {table.rows.row_format for table in ServingManifest.read(tmp_path / "model").tables}
    assert formats == {rows}


@pytest.mark.slow
def test_tables_by_name(run_ranks, tmp_path):
    """A format and unknown ids for a table; a Tensor-Train table with a format is exported as
    rows."""
    default = [0.5] * 12
    want = run_ranks(
        1,
        exported,
        tmp_path / "model",
        "table_wise",
        {
            "rows": {"ebc.embedding_bags.user": "int8", "ebc.embedding_bags.pages": "fp32"},
            "unknown": {"user": default, "likes": "zero"},
        },
    )[0]
    manifest = ServingManifest.read(tmp_path / "model")
    formats = {table.name: table.rows.row_format for table in manifest.tables}
    assert formats["ebc.embedding_bags.user"] == "int8"
    assert formats["ebc.embedding_bags.pages"] == "fp32"
    assert formats["ebc.embedding_bags.country"] == "fp32"
    groups = [name for group in manifest.tensor_train for name in group.names]
    assert "ebc.embedding_bags.page" in groups
    assert "ebc.embedding_bags.pages" not in groups
    model = serving.load(tmp_path / "model")
    got = model(*random_batch(1, 3))["made_of"]
    assert got.shape == want[0]["made_of"].shape
    unseen = {"user": [[12345]], "likes": [[12345]], "seen": [[12345]]}
    ids = {key: unseen.get(key, [[]]) for key in [*BAGS, *SEQUENCE]}
    weights = {"likes": [[2.0]], "tags": [[]]}
    keyed = serving.KeyedIds.from_lists({"likes": [[12345]], "tags": [[]]}, weights)
    made_of = model(torch.zeros(1, 4), ids, keyed)["made_of"][0]
    columns = made_of.tolist()
    assert columns.count(0.5) >= 12  # of user
    assert bool(made_of[-24:-16].ne(0).all())  # the initial row of an id
