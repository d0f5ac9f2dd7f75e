"""Threads of a non-blocking save: their work, its order, and the memory they count."""

from __future__ import annotations

import random
import threading
import time

import pytest

from torchrec_hkv.write_behind import SaveHandle
from torchrec_hkv.write_behind_file import WriteBehindFile


def _wait_until(is_true) -> None:
    for _ in range(1000):
        if is_true():
            return
        time.sleep(0.005)
    raise AssertionError("It did not become true.")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_order(tmp_path, threads):
    """Jobs of a lane run in order. A job without a lane runs alone, after all earlier jobs."""
    choice = random.Random(threads)
    lanes = [choice.choice([None, "a", "b", "c"]) for _ in range(300)]
    began, ended = [], []

    def job(number):
        began.append(number)
        if number % 7 == 0:
            time.sleep(0.001)
        ended.append(number)

    handle = SaveHandle(tmp_path, threads=threads)
    for number, lane in enumerate(lanes):
        handle.defer(lambda number=number: job(number), lane=lane)
    handle.close()
    handle.wait(60)
    assert sorted(ended) == list(range(300))
    for lane in "abc":
        own = [number for number, its in enumerate(lanes) if its == lane]
        assert [number for number in ended if lanes[number] == lane] == own
    for number in (number for number, lane in enumerate(lanes) if lane is None):
        # Earlier jobs have ended when it begins, and later ones begin after it ends.
        assert set(began[: began.index(number)]) == set(range(number))
        assert set(ended[: ended.index(number)]) == set(range(number))


def test_lanes_run_beside_each_other(tmp_path):
    handle, meet = SaveHandle(tmp_path, threads=3), threading.Barrier(3, timeout=30)
    for lane in range(3):
        handle.defer(meet.wait, lane=lane)
    handle.close()
    handle.wait(60)


def test_memory_is_free_when_all_jobs_that_hold_it_are_done(tmp_path):
    first, second = threading.Event(), threading.Event()
    handle = SaveHandle(tmp_path, staging_bytes=10, threads=2)
    handle.reserve(8)
    handle.defer_all([("a", first.wait), ("b", second.wait)], 8)
    reserved = threading.Thread(target=lambda: handle.reserve(5))
    reserved.start()
    first.set()
    reserved.join(0.05)
    assert reserved.is_alive()
    assert handle.progress == 0
    second.set()
    reserved.join(30)
    assert not reserved.is_alive()
    assert handle.progress > 0
    handle.defer(lambda: None, 5, lane="a")
    handle.close()
    handle.wait(60)
    assert handle.staged_bytes == 8
    assert handle.blocked_seconds > 0


def test_copies_are_written_once_all_are_made(tmp_path):
    """Copies take up to half of the memory and are written later; jobs without copies run at
    once."""
    written = []
    handle = SaveHandle(tmp_path, staging_bytes=10, threads=2)
    for lane in "ab":
        handle.defer(lambda lane=lane: written.append(f"open {lane}"), lane=lane)
        handle.reserve(2)
        handle.defer(lambda lane=lane: written.append(f"write {lane}"), 2, lane=lane)
        handle.defer(lambda lane=lane: written.append(f"sync {lane}"), lane=lane)
    _wait_until(lambda: len(written) == 2)
    time.sleep(0.05)
    assert sorted(written) == ["open a", "open b"]
    handle.close()
    handle.wait(60)
    for lane in "ab":
        own = [done for done in written if done.endswith(lane)]
        assert own == [f"{what} {lane}" for what in ("open", "write", "sync")]
    assert handle.staged_bytes == 4


def test_copies_are_written_at_once_where_memory_runs_short(tmp_path):
    written = []
    handle = SaveHandle(tmp_path, staging_bytes=10, threads=2)
    for number in range(3):
        handle.reserve(3)
        handle.defer(lambda number=number: written.append(number), 3, lane="a")
    _wait_until(lambda: written == [0, 1, 2])  # more may come
    handle.close()
    handle.wait(60)


def test_after_an_error_only_what_must_be_done_is_done(tmp_path):
    done, go_on = [], threading.Event()
    handle = SaveHandle(tmp_path, threads=2)

    def fail():
        go_on.wait()
        raise OSError("the disk is gone")

    handle.defer(fail, lane="a")
    handle.defer(lambda: done.append("skipped"), lane="a")
    handle.defer(lambda: done.append("closed"), lane="a", always=True)
    handle.on_error(lambda: done.append("undone"))
    handle.close(lambda error: done.append(str(error)))
    go_on.set()
    with pytest.raises(OSError, match="the disk is gone"):
        handle.wait(60)
    assert done == ["closed", "the disk is gone", "undone"]


def test_a_job_lets_go_of_what_it_held(tmp_path):
    import weakref

    class Held:
        pass

    held, handle = Held(), SaveHandle(tmp_path)
    removed = weakref.ref(held)
    handle.defer(lambda held=held: None, lane="a")
    del held
    _wait_until(lambda: removed() is None)
    handle.close()
    handle.wait(60)


@pytest.mark.parametrize("deferred", [False, True])
def test_files(tmp_path, deferred):
    import zlib

    data = random.Random(3).randbytes(40 << 20)
    handle = SaveHandle(tmp_path) if deferred else None
    with WriteBehindFile(tmp_path / "file", handle) as file:
        for at in range(0, len(data), 7 << 20):
            assert file.write(data[at : at + (7 << 20)]) == len(data[at : at + (7 << 20)])
        assert file.tell() == len(data)
    if handle is not None:
        handle.close()
        handle.wait(60)
    assert (tmp_path / "file").read_bytes() == data
    assert file.crc32 == zlib.crc32(data)
    with pytest.raises(FileExistsError):
        WriteBehindFile(tmp_path / "file", None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"staging_bytes": 0}, "staging_bytes is 0, but must be an integer, at least 1"),
        ({"device_staging_bytes": -1}, "device_staging_bytes is -1, but must be an integer, at l"),
        ({"device_staging_bytes": 1.5}, "device_staging_bytes is 1.5"),
        ({"device_staging_bytes": True}, "device_staging_bytes is True"),
    ],
)
def test_bad_numbers(tmp_path, given, sentence):
    threads = threading.active_count()
    with pytest.raises(ValueError, match=sentence):
        SaveHandle(tmp_path, **given)
    assert threading.active_count() == threads
