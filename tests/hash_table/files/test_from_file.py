"""HashTable.from_file makes a table from a file."""

import pytest
import torch

from tests.support.saved_tables import assert_same, entries, filled, snapshot
from tests.support.tables import distinct_ids
from torchrec_hkv.hash_table import HashTable, Uniform, table_memory


def test_as_it_was(device_type, tmp_path):
    table = filled(
        device_type,
        dim=3,
        dtype=torch.bfloat16,
        eviction="epoch_lfu",
        state_dim=2,
        name="user",
        seed=-5,
        initializer=Uniform(-0.1, 0.3),
    )
    table.save(tmp_path)
    loaded = HashTable.from_file(tmp_path, device=device_type)
    assert_same(snapshot(table), snapshot(loaded))
    assert (loaded.dim, loaded.dtype, loaded.eviction, loaded.state_dim) == (
        3, torch.bfloat16, "epoch_lfu", 2,
    )  # fmt: skip
    # New ids start from the same initial rows.
    ids = distinct_ids(50, device_type)
    assert torch.equal(loaded.find(ids)[0], table.find(ids)[0])
    loaded.save(tmp_path)
    table.load(tmp_path)


def test_of_another_capacity(device_type, tmp_path):
    table = filled(device_type)
    table.save(tmp_path)
    loaded = HashTable.from_file(tmp_path, capacity=3000, device=device_type)
    assert loaded.capacity >= 3000
    assert entries(loaded) == entries(table)
    with pytest.raises(ValueError, match="holds 500 entries"):
        HashTable.from_file(tmp_path, capacity=300, device=device_type)
    loaded = HashTable.from_file(tmp_path, capacity=300, device=device_type, allow_loss=True)
    assert loaded.size == loaded.capacity


@pytest.mark.gpu
@pytest.mark.parametrize("room", [None, 20_000, 0])
def test_on_another_device(tmp_path, room):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    minimum = table_memory(2000, 4, 2, "lfu").least_hbm_bytes
    hbm_bytes = None if room is None else minimum + room
    table = filled("cpu", 3000, 2000, eviction="lfu", state_dim=2)
    table.save(tmp_path / "cpu")
    on_gpu = HashTable.from_file(tmp_path / "cpu", device="cuda", hbm_bytes=hbm_bytes)
    assert_same(snapshot(table), snapshot(on_gpu))
    on_gpu.save(tmp_path / "gpu")
    back = HashTable.from_file(tmp_path / "gpu")
    assert_same(snapshot(table), snapshot(back))


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="no saved table"):
        HashTable.from_file(tmp_path)
