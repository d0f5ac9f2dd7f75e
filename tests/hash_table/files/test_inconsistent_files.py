"""Files with correct checksums that contradict themselves, as another program might write them."""

import dataclasses

import pytest

from tests.support.rewritten_tables import rewrite
from tests.support.saved_tables import assert_refused, buckets_of, filled, like
from torchrec_hkv.hash_table import HashTable
from torchrec_hkv.hash_table.files.manifest import Manifest


@pytest.fixture
def saved(tmp_path):
    filled("cpu").save(tmp_path)
    return tmp_path


def test_unchanged_it_loads(saved):
    rewrite(saved, lambda memory: None)
    assert filled("cpu").load(saved) == 0


@pytest.mark.parametrize("slot", [-1, -(2**63), 2**62, 10**6])
def test_a_slot_that_there_is_not(saved, slot):
    def change(memory):
        memory["slots"][3:5] = slot

    rewrite(saved, change)
    assert_refused(lambda t: t.load(saved), filled("cpu"), "2 of its 500 ids are not in their")


def test_ids_in_foreign_buckets(saved):
    def change(memory):
        memory["ids"][:] = memory["ids"].flip(0)

    rewrite(saved, change)
    assert_refused(lambda t: t.load(saved), filled("cpu"), "ids are not in their own buckets")


def test_ids_of_other_owners(saved):
    rewrite(saved, lambda memory: (0, 1 << 15))
    assert_refused(lambda t: t.load(saved), filled("cpu"), "ids are not in their own buckets")


def test_a_slot_taken_twice(saved, device_type):
    def change(memory):
        memory["slots"][1], memory["ids"][1] = memory["slots"][0], memory["ids"][0]

    rewrite(saved, change)
    assert_refused(lambda t: t.load(saved), filled(device_type), "its slots do not ascend")


def test_an_id_in_both_of_its_buckets(saved, device_type):
    def change(memory):
        # The first two entries of which one id could be in the other's slot.
        slots, ids = memory["slots"].tolist(), memory["ids"].tolist()
        manifest = Manifest.read(saved)
        for at, id_ in enumerate(ids):
            other = buckets_of(id_, manifest.buckets) - {slots[at] // manifest.bucket_slots}
            there = [k for k, slot in enumerate(slots) if {slot // manifest.bucket_slots} == other]
            if there:
                memory["ids"][there[0]] = id_
                return

    rewrite(saved, change)
    assert_refused(
        lambda t: t.load(saved), filled(device_type), r"it holds id -?\d+ more than once"
    )
    with pytest.raises(ValueError, match=r"it holds id -?\d+ more than once"):
        HashTable.from_file(saved, device=device_type)


def test_more_entries_than_slots(saved):
    manifest = Manifest.read(saved)
    dataclasses.replace(manifest, buckets=1, bucket_slots=64, capacity=64).write(saved)
    Manifest.commit(saved)
    assert_refused(
        lambda t: t.load(saved),
        filled("cpu"),
        "entries is 500, but must be at most the number of slots, 64",
    )


def test_a_shard_outside_of_the_folder(saved):
    manifest = Manifest.read(saved)
    shard = dataclasses.replace(manifest.shards[0], file="../secret.safetensors")
    dataclasses.replace(manifest, shards=(shard,)).write(saved)
    Manifest.commit(saved)
    assert_refused(
        lambda t: t.load(saved),
        like(filled("cpu")),
        r"shards\[0\].file is '../secret.safetensors', but must be",
    )
