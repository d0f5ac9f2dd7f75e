"""A load refuses a file of another table, with one sentence that names both values."""

import json

import pytest
import torch

from tests.support.saved_tables import assert_refused, filled
from torchrec_hkv.hash_table import Uniform

OTHERS = {
    "dim": ({"dim": 8}, "4", "8"),
    "dtype": ({"dtype": torch.float16}, "'float32'", "'float16'"),
    "eviction": ({"eviction": "epoch_lfu"}, "'lru'", "'epoch_lfu'"),
    "state_dim": ({"state_dim": 2}, "0", "2"),
    "name": ({"name": "other"}, "'table'", "'other'"),
    "seed": ({"seed": 7}, "0", "7"),
    "initializer": ({"initializer": Uniform(-2, 1)}, "{'type': 'Uniform', 'low': -1", "-2"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_refused(device_type, tmp_path, what):
    options, saved, own = OTHERS[what]
    filled(device_type).save(tmp_path)
    target = filled(device_type, 77, **options)
    caught = assert_refused(lambda t: t.load(tmp_path), target, f"its {what} is {saved}")
    sentence = str(caught.value)
    assert own in sentence
    assert str(tmp_path) in sentence
    assert sentence.count(". ") == 0


@pytest.mark.parametrize("version", [1, 3, True, None])
def test_another_version(tmp_path, version):
    filled("cpu").save(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"version": 2', f'"version": {json.dumps(version)}'))
    assert_refused(
        lambda t: t.load(tmp_path), filled("cpu"), f"has version {version}, but .* version 2"
    )


def test_other_json(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "something else"}')
    assert_refused(lambda t: t.load(tmp_path), filled("cpu"), "not a file of a hash table")
