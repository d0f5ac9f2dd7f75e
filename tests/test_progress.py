"""Progress counts bytes of all threads; a nested task adds to the outer one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tqdm import tqdm

from torchrec_hkv.progress import advance, current, expect, reported, use_progress


def test_threads_that_adopt_a_task_add_to_it():
    with reported("Reading", 800) as task:
        with ThreadPoolExecutor(4, initializer=use_progress, initargs=(task,)) as pool:
            list(pool.map(advance, [100] * 8))
        assert task.done == 800
        assert task.share == 1


def test_other_threads_do_not():
    with reported("Reading", 800) as task:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(advance, 100).result()
        assert task.done == 0
    assert current() is None
    advance(5)  # no effect


def test_a_task_within_a_task():
    with reported("Outer", 10) as outer:
        with reported("Inner", 5) as inner:
            advance(3)
        advance(4)
    assert inner is outer
    assert (outer.done, outer.share) == (7, 0.7)


def test_no_total():
    with reported("Reading") as task:
        advance(3)
        assert task.share == 0
        task.set_total(6)
        assert task.share == 0.5


def test_more_to_do():
    expect(5)  # no effect
    with reported("Reading", 10) as task:
        expect(30)
        advance(10)
        assert (task.total, task.share) == (40, 0.25)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork warns about threads
def test_a_forked_process_that_is_killed_blocks_no_bar(monkeypatch):
    lock = multiprocessing.RLock()  # like tqdm's own, which is shared with the fork
    monkeypatch.setattr(tqdm, "_lock", lock, raising=False)
    child = os.fork()
    if child == 0:
        lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)

    def work():
        with reported("Reading", 10):
            advance(10)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
