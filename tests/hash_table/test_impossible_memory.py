"""A table too large for memory is refused before any allocation, with both sizes."""

import pytest
import torch

from tests.support.gpu import needs_gpu
from torchrec_hkv import _C
from torchrec_hkv.hash_table import HashTable, TableGroup, TableSpec, available_memory, table_memory


def figures(message: str) -> tuple[int, int]:
    needed, there = (int(word) for word in message.split() if word.isdigit())
    return needed, there


@pytest.mark.parametrize("initial", [None, 1 << 10])
def test_more_host_memory_than_there_is(initial):
    capacity = 1 << 37
    with pytest.raises(
        ValueError, match=r"table 'table' takes .* of host memory .* bytes"
    ) as error:
        HashTable(512, capacity, initial_capacity=initial)
    needed, there = figures(str(error.value))
    assert needed == table_memory(capacity, 512, 0, "lru", initial_capacity=initial).bytes
    available, total = available_memory.host_memory()
    if initial is None:
        assert "from the start" in str(error.value)
        assert "available" in str(error.value)
        assert 0 < there <= total
        assert abs(there - available) < 4 << 30  # other programs use memory, too
    else:
        assert "at the full capacity" in str(error.value)
        assert there == total


def test_tables_of_a_group_are_added_up():
    available, _ = available_memory.host_memory()
    capacity = available // (4 * 256 * 2)
    specs = [TableSpec(f"t{i}", capacity, 256) for i in range(4)]
    with pytest.raises(ValueError, match="table 't0' and the others of its group take") as error:
        TableGroup(specs, [0, 1, 2, 3])
    assert figures(str(error.value))[0] == 4 * table_memory(capacity, 256, 0, "lru").bytes


@needs_gpu
@pytest.mark.parametrize("initial", [None, 1 << 10])
def test_more_gpu_memory_than_there_is(initial):
    free, total = available_memory.gpu_memory(torch.device("cuda", 0))
    dim = 64
    capacity = (free if initial is None else total) // (4 * dim)  # the index is too large
    before = torch.cuda.mem_get_info()[0]
    with pytest.raises(ValueError, match=r"table 'table' takes .* of GPU memory .* bytes") as error:
        HashTable(dim, capacity, device="cuda", initial_capacity=initial)
    needed, there = figures(str(error.value))
    expected = table_memory(capacity, dim, 0, "lru", initial_capacity=initial)
    # The only table of its group, this large and with a fixed size, packs its ids.
    index = _C.index_bytes(capacity, False, initial, packed=initial is None)
    assert needed == index + expected.num_slots * expected.row_bytes
    assert there == total if initial else abs(there - free) < 1 << 30
    # Other programs use memory, too, but the index alone exceeds it.
    assert abs(torch.cuda.mem_get_info()[0] - before) < 1 << 30 < index


@needs_gpu
def test_rows_beyond_hbm_bytes_count_as_host_memory():
    _, total = available_memory.host_memory()
    capacity = total // (4 * 256) + 10_000_000
    memory = table_memory(capacity, 256, 0, "lru")
    with pytest.raises(ValueError, match="of host memory"):
        HashTable(256, capacity, device="cuda", hbm_bytes=memory.least_hbm_bytes)


@needs_gpu
def test_what_pytorch_holds_without_use_counts_as_free():
    """Retries, since other processes on the GPU may take or return memory meanwhile."""
    device = torch.device("cuda", 0)
    differences = []
    for _ in range(10):
        torch.cuda.empty_cache()
        free, _ = available_memory.gpu_memory(device)
        held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        del held
        differences.append(abs(available_memory.gpu_memory(device)[0] - free))
    assert min(differences) < 64 << 20


MEMINFO = "MemTotal:  1000 kB\nMemFree:  5 kB\nMemAvailable:  800 kB\nHugePages_Total: 0\n"


def write_meminfo(root) -> None:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(MEMINFO)


def test_reads_what_the_system_says(tmp_path):
    write_meminfo(tmp_path)
    assert available_memory.host_memory(tmp_path) == (800 * 1024, 1000 * 1024)


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [
        ("500000", "300000", 100_000, (300_000, 500_000)),
        ("500000", "600000", 0, (0, 500_000)),
        ("max", "300000", 0, (800 * 1024, 1000 * 1024)),
        ("99999999", "300000", 0, (800 * 1024, 1000 * 1024)),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_reads_a_containers_limit(tmp_path, version, limit, used, cached, expected):
    write_meminfo(tmp_path)
    group = tmp_path / "sys/fs/cgroup"
    if version == 1:
        group /= "memory"
        limit = str(2**63 - 4096) if limit == "max" else limit
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    else:
        names = ("memory.max", "memory.current", "inactive_file")
    group.mkdir(parents=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")
    assert available_memory.host_memory(tmp_path) == expected


def test_more_rows_than_can_be_counted_are_refused_at_once():
    with pytest.raises(ValueError, match=r"capacity is 9223372036854775807, but must be at most"):
        HashTable(4, 2**63 - 1)
    with pytest.raises(ValueError, match=r"table 'table': capacity is \d+, but must be at most"):
        HashTable(4, 2**58)
