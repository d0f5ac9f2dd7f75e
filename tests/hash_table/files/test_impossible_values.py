"""A load of a manifest with one changed value and a correct checksum is refused by name and changes
nothing, or gives the same entries."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.mutations import GONE, mutated, mutations, refusal, write
from tests.support.saved_tables import assert_same, entries, filled, like, snapshot
from tests.support.tables import distinct_ids, random_rows
from torchrec_hkv.hash_table import HashTable, MinFrequency, TableGroup, TableSpec, Uniform, files

KINDS = {
    "lru": {"eviction": "lru", "initializer": Uniform(-1, 1)},
    "growing": {"eviction": "epoch_lfu", "state_dim": 3, "initial_capacity": 128, "capacity": 5000},
    "counting": {"eviction": "lfu", "admission": MinFrequency(2, entries=1024)},
}
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def saved_kind(kind):
    table = filled("cpu", **KINDS[kind])
    if table._group.tables[0].admission is not None:  # admits ids that come twice
        ids = distinct_ids(450, "cpu")
        for _ in range(2):
            table.insert_or_assign(ids, random_rows(table, 450))
    return table


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table") / "t"
    table = saved_kind(request.param)
    files.save(table._group, 0, folder, epoch=table.epoch, shard_bytes=6000)
    content = json.loads((folder / "manifest.json").read_text())
    assert len(content["shards"]) > 1
    return folder, entries(table), content, KINDS[request.param]


@pytest.fixture(scope="module")
def targets(saved):
    """Tables that hold other ids and have loaded nothing: one, or none."""
    return []


def test_as_it_is_written(saved):
    folder, content_of_table, content, options = saved
    write(folder / "manifest.json", content)
    table = filled("cpu", 40, **options)
    table.load(folder)
    assert entries(table) == content_of_table


@pytest.mark.slow
@SETTINGS
@given(data=st.data())
def test_load(saved, targets, data):
    folder, content_of_table, content, options = saved
    path, value = data.draw(mutations(content))
    write(folder / "manifest.json", mutated(content, path, value))
    if not targets:
        targets.append(filled("cpu", 40, **options))
    table = targets[0]
    before = snapshot(table)
    message = refusal(lambda: table.load(folder))
    if message is None:
        targets.clear()
        assert entries(table) == content_of_table
    else:
        assert str(folder) in message
        assert_same(before, snapshot(table))


@SETTINGS
@given(data=st.data())
def test_from_file(saved, data):
    folder, content_of_table, content, _ = saved
    path, value = data.draw(mutations(content))
    write(folder / "manifest.json", mutated(content, path, value))
    loaded = []
    message = refusal(lambda: loaded.append(HashTable.from_file(folder)))
    if message is None:
        assert entries(loaded[0]) == content_of_table
    else:
        assert str(folder) in message


CASES = [
    ("clock", -1, "an integer from 0 to 2^32 - 1"),
    ("clock", 1 << 60, "an integer from 0 to 2^32 - 1"),
    ("clock", 2.0, "an integer from 0 to 2^32 - 1"),
    ("clock", True, "an integer from 0 to 2^32 - 1"),
    ("epoch", -1, "an integer from 0 to 2^32 - 1"),
    ("optimizer_step", None, "an integer from 0 to 2^63 - 1"),
    ("optimizer_step", -1, "an integer from 0 to 2^63 - 1"),
    ("capacity", -1, "an integer from 1 to 2^37"),
    ("capacity", [700], "an integer from 1 to 2^37"),
    ("initial_capacity", 0, "an integer from 1 to 2^37, or null"),
    ("buckets", 1 << 50, "an integer from 1 to 2^32 - 1"),
    ("bucket_slots", 65, "an integer from 1 to 64"),
    ("state_layout", 99, "one of 0, 1, "),
    ("save", "../x", "8 to 32 hexadecimal digits"),
    ("shards", None, "a list of an object"),
    ("shards", {}, "a list of an object"),
    ("table", [], "an object with the keys name, dim"),
    ("table.dim", 1.5, "an integer from 1 to 2048"),
    ("table.dtype", "uint8", "one of 'float32', 'float16', 'bfloat16'"),
    ("table.dtype", "load", "one of 'float32', 'float16', 'bfloat16'"),
    ("table.eviction", None, "one of 'lru', "),
    ("table.name", "\ud800", "a string"),
    ("table.seed", 1 << 63, "an integer from -2^63 to 2^63 - 1"),
    ("table.initializer.type", "Shell", "one of 'Uniform', "),
    ("table.initializer.low", float("inf"), None),
    ("shards.0.file", "../x", "the name of a shard"),
    ("shards.0.file", "/etc/passwd", "the name of a shard"),
    ("shards.0.entries", -1, "an integer from 1 to 2^38"),
    ("shards.0.bytes", "many", "an integer from 1 to 2^62"),
    ("shards.0.crc32", 7, "an object"),
    ("shards.1.owner_begin", 0, "at least "),
    ("shards.0.owner_end", 0, "an integer from 1 to 2^16"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), CASES)
def test_the_error_names_file_key_value_and_what_is_allowed(tmp_path, key, value, allowed):
    table = filled("cpu", initializer=Uniform(-1, 1))
    files.save(table._group, 0, tmp_path, shard_bytes=6000)
    file = tmp_path / "manifest.json"
    path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    write(file, mutated(json.loads(file.read_text()), path, value))
    with pytest.raises(ValueError, match=r"must be|not JSON") as refusal:
        like(table).load(tmp_path)
    message = str(refusal.value)
    assert message.startswith(str(file))
    if allowed is None:  # JSON has no infinity
        assert "is damaged: it is not JSON" in message
        return
    shown = ".".join(str(part) for part in path).replace(".0", "[0]").replace(".1", "[1]")
    assert message.removeprefix(f"{file}: ").startswith(f"{shown} is ")
    assert f"but must be {allowed}" in message


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (("counts", "cell_bits"), lambda _: 8, "cell_bits is 8, but must be 128 for cells"),
        (("counts", "bytes"), lambda size: size + 1, "bytes is .*, but must be a multiple of 128"),
        (
            ("shards", 1, "file"),
            lambda name: name.replace("00001", "00000"),
            "file is .*, but must be the name of no other shard",
        ),
    ],
)
def test_values_that_contradict_others(tmp_path, path, change, message):
    table = saved_kind("counting")
    files.save(table._group, 0, tmp_path, shard_bytes=6000)
    content = json.loads((tmp_path / "manifest.json").read_text())
    value = content
    for part in path:
        value = value[part]
    write(tmp_path / "manifest.json", mutated(content, path, change(value)))
    with pytest.raises(ValueError, match=message):
        HashTable.from_file(tmp_path)


@pytest.mark.parametrize("key", ["clock", "save", "table", "shards", "capacity", "counts"])
def test_a_missing_key(tmp_path, key):
    filled("cpu").save(tmp_path)
    file = tmp_path / "manifest.json"
    write(file, mutated(json.loads(file.read_text()), (key,), GONE))
    with pytest.raises(ValueError, match=f"manifest.json: {key} is missing, but must be "):
        HashTable.from_file(tmp_path)


def test_a_key_that_is_there_twice(tmp_path):
    filled("cpu").save(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text().replace('"clock":', '"clock": 5, "clock":', 1))
    with pytest.raises(ValueError, match=r"manifest.json .*the key 'clock' occurs twice"):
        HashTable.from_file(tmp_path)


def test_nested_too_deeply(tmp_path):
    filled("cpu").save(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"manifest.json is damaged: it is not JSON"):
        HashTable.from_file(tmp_path)


def test_a_table_of_a_group(tmp_path):
    """The clock belongs to all tables of a group, so a refused load leaves it unchanged too."""
    filled("cpu", name="b").save(tmp_path / "t")
    shutil.copytree(tmp_path / "t", tmp_path / "bad")
    file = tmp_path / "bad" / "manifest.json"
    write(file, mutated(json.loads(file.read_text()), ("clock",), 1 << 60))
    specs = [TableSpec(name, 700, 4, initializer=Uniform(-1, 1)) for name in "ab"]
    group = TableGroup(specs, [0, 1], device="cpu", state_dim=0)
    files.load(group, 1, tmp_path / "t")
    clock, sizes = group.clock, group.sizes()
    with pytest.raises(ValueError, match="clock is 1152921504606846976, but must be an integer"):
        files.load(group, 1, tmp_path / "bad")
    assert (group.clock, group.sizes()) == (clock, sizes)
