"""Block files return what was written, wherever batches begin and end."""

import gc
import os
import random
import weakref

import pytest
import torch

from tests.support.saved_tables import assert_same, filled, like, shard_files, snapshot
from torchrec_hkv.hash_table import files
from torchrec_hkv.hash_table.files.block_files import BLOCK, BlockFile, block_memory, host_memory
from torchrec_hkv.hash_table.files.shard_files import ShardReader, ShardWriter, Staging, fields_of
from torchrec_hkv.hash_table.files.shard_plan import plan_shards

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def random_entries(fields, n):
    generator = torch.Generator().manual_seed(n)
    return {
        field.name: torch.randint(
            0, 256, (n * field.entry_bytes,), dtype=torch.uint8, generator=generator
        )
        .view(field.dtype)
        .view(field.shape(n))
        for field in fields
    }


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_and_bytes(tmp_path, direct):
    """Blocks bypass the page cache, bytes between them go through it; both modes read back the
    same."""
    path = tmp_path / "f"
    memory = block_memory(4 * BLOCK)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    assert memory.data_ptr() % BLOCK == 0
    file = BlockFile(path, NEW, direct)
    file.write_blocks(host_memory(memory), BLOCK)
    file.write(b"abc", BLOCK - 3)
    file.write(b"xyz", 5 * BLOCK)
    file.sync()
    file.close()
    data = bytes(host_memory(memory))
    assert path.read_bytes()[BLOCK - 3 :] == b"abc" + data + b"xyz"
    file = BlockFile(path, os.O_RDONLY, direct)
    assert file.size() == 5 * BLOCK + 3
    again = block_memory(2 * BLOCK)
    assert file.read_blocks(host_memory(again), 4 * BLOCK, BLOCK + 3) == BLOCK + 3
    assert bytes(host_memory(again))[: BLOCK + 3] == data[3 * BLOCK :] + b"xyz"
    assert file.read_blocks(host_memory(again), 4 * BLOCK, BLOCK + 4) == BLOCK + 3
    file.close()


@pytest.mark.parametrize("size", [0, 1, BLOCK, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_memory_of_any_size(size):
    memory = block_memory(size)
    assert memory.dtype == torch.uint8
    assert memory.shape == (size,)
    assert size == 0 or memory.data_ptr() % BLOCK == 0
    values = torch.randint(0, 256, (size,), dtype=torch.uint8)
    part = memory.copy_(values)[size // 2 :]
    del memory
    gc.collect()
    assert torch.equal(part, values[size // 2 :])


def test_fields_of_a_staging_lie_apart():
    fields = fields_of(7, torch.float32, 3, True)
    n = 1000
    staging = Staging(fields, n)
    entries = random_entries(fields, n)
    for field in fields:
        staging.view(field, BLOCK - 8, n).copy_(entries[field.name])
    for field in fields:
        found, wanted = staging.view(field, BLOCK - 8, n), entries[field.name]
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))  # also a NaN's bits
        assert len(staging.blocks(field)) % BLOCK == 0


def test_bytes_keep_their_memory():
    memory = block_memory(BLOCK)
    kept = weakref.ref(memory)
    data = host_memory(memory)
    del memory
    gc.collect()
    assert kept() is not None
    del data
    gc.collect()
    assert kept() is None


def test_memory_that_no_disk_reads_to_goes_through_the_cache(tmp_path):
    """The file system refuses direct I/O from unaligned memory, so the write goes through the
    cache."""
    path = tmp_path / "f"
    data = host_memory(block_memory(2 * BLOCK).fill_(7)[1 : BLOCK + 1])
    file = BlockFile(path, NEW)
    file.write_blocks(data, 0)
    assert not file.is_direct
    file.close()
    assert path.read_bytes() == b"\7" * BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "state_dim"), [(1, 0), (3, 1), (64, 128)])
def test_batches_of_any_length(tmp_path, dtype, dim, state_dim):
    """Writes some pieces and reads others; compares all bytes, and checksums with those of other
    code."""
    fields = fields_of(dim, dtype, state_dim, keeps_scores=True)
    n = 40_000
    entries = random_entries(fields, n)
    choice = random.Random(dim)
    path = tmp_path / "shard-00000000-00000.safetensors"
    with ShardWriter(path, Staging(fields, 7_000), (0, 1 << 16), n) as writer:
        first = 0
        while first < n:
            size = min(choice.choice([1, 5, 300, 7_000]), n - first)
            for name, to in writer.memory(size).items():
                to.copy_(entries[name][first : first + size])
            writer.write(size)
            first += size
        assert writer.remaining_entries == 0
        shard = writer.finish()
    assert path.stat().st_size == shard.bytes
    for longest in (1_777, n):
        with ShardReader(path, fields, shard) as reader:
            first = 0
            for batch in reader.verified_batches(Staging(fields, longest)):
                size = len(batch["ids"])
                for name, value in batch.items():
                    expected = entries[name][first : first + size].contiguous()
                    assert torch.equal(value.view(torch.uint8), expected.view(torch.uint8))
                first += size
            assert first == n


def test_a_table_past_the_page_cache(device_type, tmp_path):
    """Several threads save and load a shard large enough for direct I/O, bit for bit."""
    table = filled(device_type, 150_000, 200_000, dim=32, eviction="lfu", state_dim=1)
    files.save(table.group, 0, tmp_path, threads=2, batch_bytes=3 << 20)
    (path,) = shard_files(tmp_path)
    assert path.stat().st_size > 16 << 20
    loaded = like(table)
    loaded.load(tmp_path)
    assert_same(snapshot(table), snapshot(loaded))


@pytest.mark.parametrize(
    ("size", "threads", "shards"),
    [
        *[(10**6, 1, 1), (4 << 30, 1, 4), (50 * 10**9, 1, 16)],
        *[(10**6, 4, 1), (128 << 20, 4, 2), (4 << 30, 4, 8), (50 * 10**9, 4, 16)],
    ],
)
def test_the_number_of_shards_is_bounded(size, threads, shards):
    """Each shard costs a scan of all slots, so the number of shards must not grow with the
    table."""
    entry = 100
    counts = torch.full((1 << 16,), size // entry >> 16) + (torch.arange(1 << 16) % 3)
    maximum = files.default_shard_bytes(int(counts.sum()) * entry, threads)
    plan = plan_shards(counts, maximum // entry)
    assert shards <= len(plan) <= shards + 1
    assert sum(entries for _, _, entries in plan) == counts.sum()
