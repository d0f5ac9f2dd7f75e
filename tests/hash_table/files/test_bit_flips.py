"""A load detects a bit flip anywhere in a saved table and names the file; nothing changes."""

import random

import pytest

from tests.support.saved_tables import assert_refused, filled, shard_files
from torchrec_hkv.hash_table import files


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    table = filled("cpu", 200, eviction="lfu", state_dim=1)
    files.save(table._group, 0, folder, shard_bytes=4000)
    return folder


@pytest.fixture(scope="module")
def target():
    """A table that refuses all loads and stays unchanged."""
    return filled("cpu", 50, eviction="lfu", state_dim=1)


@pytest.fixture
def flip_and_load(saved, target):
    def flip(path, bit):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        try:
            assert_refused(lambda t: t.load(saved), target, path.name)
        finally:
            path.write_bytes(good)

    return flip


@pytest.mark.parametrize("seed", range(60))
def test_in_a_shard(saved, flip_and_load, seed):
    choice = random.Random(seed)
    path = choice.choice(shard_files(saved))
    flip_and_load(path, choice.randrange(8 * path.stat().st_size))


def test_in_every_byte_of_a_header(saved, flip_and_load):
    path = shard_files(saved)[0]
    header = path.read_bytes()
    length = 8 + int.from_bytes(header[:8], "little")
    for byte in range(0, length, 3):
        flip_and_load(path, 8 * byte + byte % 8)


def test_in_the_manifest(saved, flip_and_load):
    path = saved / "manifest.json"
    choice = random.Random(1)
    for _ in range(150):
        flip_and_load(path, choice.randrange(8 * path.stat().st_size - 8))
