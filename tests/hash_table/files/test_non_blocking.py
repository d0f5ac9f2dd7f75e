"""HashTable.save(blocking=False) holds the content at the moment of the call, in bounded memory."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest
import torch

from tests.support.processes import run_python
from tests.support.saved_tables import entries, filled, like
from tests.support.tables import distinct_ids, random_rows
from torchrec_hkv.hash_table import HashTable, files
from torchrec_hkv.hash_table.files import table_save
from torchrec_hkv.write_behind import SaveHandle


def _change(table, device):
    """Changes all rows, adds ids, and then clears the table."""
    ids = distinct_ids(900, device)
    scores = torch.ones_like(ids) if table.eviction in ("lfu", "customized") else None
    table.insert_or_assign(ids, random_rows(table, 900), scores)
    table.clear()
    assert table.size == 0


# GPU memory for copies: enough for all, for some, and none, so that copies go to host memory at
# once.
@pytest.mark.parametrize("on_device", [None, 3000, 0])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("policy", ["lru", "customized"])
def test_the_table_changes_meanwhile(device_type, tmp_path, policy, threads, on_device):
    if device_type == "cpu" and on_device is not None:
        pytest.skip("there is no memory of a GPU")
    table = filled(device_type, 500, 700, eviction=policy, state_dim=2)
    before, go_on = entries(table), threading.Event()
    handle = SaveHandle(tmp_path, device_staging_bytes=on_device)
    handle.defer(go_on.wait)
    sizes = {"batch_bytes": 8192, "shard_bytes": 4000, "threads": threads}
    files.save(table._group, 0, tmp_path / "t", handle=handle, **sizes)
    handle.close()
    try:
        _change(table, device_type)
        assert not (tmp_path / "t" / "manifest.json").exists()
    finally:
        go_on.set()
    handle.wait(60)
    if device_type == "cuda":
        assert (handle.device_staged_bytes > 0) == (on_device != 0)
        assert (handle.staged_bytes > 0) == (on_device is not None)
    loaded = like(table)
    assert loaded.load(tmp_path / "t") == 0
    assert entries(loaded) == before


@pytest.mark.gpu
def test_memory_that_pytorch_keeps_is_free_for_copies(tmp_path):
    """PyTorch keeps the memory of a save's copies, so the next save can use it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    table = filled("cuda", 500, 700)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    kept = torch.empty(int(free - 0.05 * total), dtype=torch.uint8, device="cuda")
    del kept
    assert torch.cuda.mem_get_info()[0] < 0.1 * total
    handle = SaveHandle(tmp_path)
    files.save(table._group, 0, tmp_path / "t", handle=handle)
    handle.close()
    handle.wait(60)
    torch.cuda.empty_cache()
    assert handle.device_staged_bytes > 0
    assert handle.staged_bytes == 0


@pytest.mark.slow
def test_large_files(device_type, tmp_path):
    # Files larger than 16 MiB bypass the page cache.
    table = HashTable(128, 60_000, device=device_type)
    ids = distinct_ids(50_000, device_type)
    table.insert_or_assign(ids, torch.randn(50_000, 128, device=device_type))
    before = entries(table)
    handle = table.save(tmp_path / "t", blocking=False, batch_bytes=8 << 20)
    table.clear()
    assert handle.wait() == tmp_path / "t"
    loaded = HashTable.from_file(tmp_path / "t", device=device_type)
    assert entries(loaded) == before


def test_memory_is_bounded(device_type, tmp_path, caplog):
    table = HashTable(64, 40_000, device=device_type)
    ids = distinct_ids(40_000, device_type)
    table.insert_or_assign(ids, torch.randn(40_000, 64, device=device_type))
    before = entries(table)
    limit = 2 << 20  # of about 10 MB
    handle = SaveHandle(tmp_path / "t", limit, device_staging_bytes=0)
    handle.defer(lambda: time.sleep(0.3))  # simulates a slow disk
    with caplog.at_level(logging.WARNING):
        files.save(table._group, 0, tmp_path / "t", batch_bytes=1 << 20, handle=handle)
    handle.close()
    assert limit / 2 < handle.staged_bytes <= limit
    assert handle.blocked_seconds > 0
    assert f"holds staging_bytes={limit} of copies: training waits" in caplog.text
    table.clear()
    handle.wait()
    assert entries(HashTable.from_file(tmp_path / "t", device=device_type)) == before
    # Pieces larger than the limit are copied one at a time.
    handle = table.save(tmp_path / "t", blocking=False, staging_bytes=1, device_staging_bytes=0)
    handle.wait()
    assert HashTable.from_file(tmp_path / "t", device=device_type).size == 0


def test_an_error(device_type, tmp_path):
    table = filled(device_type)
    table.save(tmp_path / "t")
    before, files_before = entries(table), sorted(os.listdir(tmp_path / "t"))
    handle = SaveHandle(tmp_path / "t")

    def fail():
        raise OSError("the disk is gone")

    handle.defer(fail)
    table.insert_or_assign(distinct_ids(9, device_type), random_rows(table, 9))
    files.save(table._group, 0, tmp_path / "t", shard_bytes=4000, handle=handle)
    handle.close()
    with pytest.raises(OSError, match="the disk is gone"):
        handle.wait()
    assert handle.done()
    assert sorted(os.listdir(tmp_path / "t")) == files_before
    assert entries(HashTable.from_file(tmp_path / "t", device=device_type)) == before


def test_aborted(device_type, tmp_path):
    table = filled(device_type)
    table.save(tmp_path / "t")
    before, files_before = entries(table), sorted(os.listdir(tmp_path / "t"))
    handle, go_on = SaveHandle(tmp_path / "t"), threading.Event()
    handle.defer(go_on.wait)
    table.insert_or_assign(distinct_ids(9, device_type), random_rows(table, 9))
    files.save(table._group, 0, tmp_path / "t", shard_bytes=4000, handle=handle)
    threading.Timer(0.1, go_on.set).start()
    handle.abort(ValueError("stopped"))
    with pytest.raises(ValueError, match="stopped"):
        handle.wait()
    assert sorted(os.listdir(tmp_path / "t")) == files_before
    assert entries(HashTable.from_file(tmp_path / "t", device=device_type)) == before


def test_an_error_after_the_commit(tmp_path, monkeypatch):
    table = filled("cpu")
    table.save(tmp_path / "t")
    table.erase(distinct_ids(5, "cpu"))

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(table_save, "remove_others", fail)
    handle = table.save(tmp_path / "t", blocking=False)
    with pytest.raises(OSError, match="the disk is gone"):
        handle.wait()
    assert entries(HashTable.from_file(tmp_path / "t")) == entries(table)


def test_waiting_for_some_time(tmp_path):
    handle, go_on = SaveHandle(tmp_path), threading.Event()
    handle.defer(go_on.wait)
    handle.close()
    with pytest.raises(TimeoutError, match=r"has not ended in 0\.01 s"):
        handle.wait(0.01)
    assert not handle.done()
    go_on.set()
    handle.wait()


_KILLED = """
import os, signal, sys
from torchrec_hkv.hash_table import HashTable, files
from torchrec_hkv.hash_table.files import table_save
from torchrec_hkv.write_behind import SaveHandle

class Killing(SaveHandle):
    jobs, last = 0, None
    def defer(self, job, size=0, *, lane=None, always=False):
        self.jobs += 1
        if self.jobs == self.last:
            super().defer(lambda: os.kill(os.getpid(), signal.SIGKILL))
        super().defer(job, size, lane=lane, always=always)

def save(last):
    table = HashTable.from_file(sys.argv[1])
    table.assign_rows(*((e := next(table.export())).ids, e.rows + 1))
    handle = Killing(sys.argv[1])
    handle.last = last
    files.save(table._group, 0, sys.argv[1], shard_bytes=4000, handle=handle)
    handle.close()
    handle.wait()
    return handle.jobs

def rows():
    entries = next(HashTable.from_file(sys.argv[1]).export())
    return sorted(zip(entries.ids.tolist(), entries.rows.tolist()))

before, last, status = rows(), 0, 9
while status == 9:
    assert rows() == before
    last += 1
    if (child := os.fork()) == 0:
        save(last)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
after = rows()
assert status == 0 and [(i, [v + 1 for v in row]) for i, row in before] == after
print(last)
"""


@pytest.mark.slow
def test_killed_in_between(tmp_path):
    table = HashTable(3, 700)
    table.insert_or_assign(torch.arange(500), torch.randint(0, 99, (500, 3)).float())
    table.save(tmp_path / "t")
    (script := tmp_path / "script.py").write_text(_KILLED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # a process with one thread can fork
    done = run_python([str(script), str(tmp_path / "t")], environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10  # kills at every job of the thread
