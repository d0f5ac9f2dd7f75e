"""A bit that flips anywhere in a saved table is noticed; the file is named, and nothing changes."""

import random

import pytest

from tests.support.saved_tables import assert_refused, filled, shard_files
from torchrec_hkv.hash_table import files


@pytest.fixture
def saved(tmp_path):
    table = filled("cpu", 200, eviction="lfu", state_dim=1)
    files.save(table._group, 0, tmp_path, shard_bytes=4000)
    return tmp_path


def flip_and_load(saved, path, bit):
    good = path.read_bytes()
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bad)
    target = filled("cpu", 50, eviction="lfu", state_dim=1)
    assert_refused(lambda t: t.load(saved), target, path.name)
    path.write_bytes(good)


@pytest.mark.parametrize("seed", range(60))
def test_in_a_shard(saved, seed):
    choice = random.Random(seed)
    path = choice.choice(shard_files(saved))
    flip_and_load(saved, path, choice.randrange(8 * path.stat().st_size))


def test_in_every_byte_of_a_header(saved):
    path = shard_files(saved)[0]
    header = path.read_bytes()
    length = 8 + int.from_bytes(header[:8], "little")
    for byte in range(0, length, 3):
        flip_and_load(saved, path, 8 * byte + byte % 8)


def test_in_the_manifest(saved):
    path = saved / "manifest.json"
    choice = random.Random(1)
    for _ in range(150):
        flip_and_load(saved, path, choice.randrange(8 * path.stat().st_size - 8))
