"""If a write or a merge is killed at any point, the previous chain is whole; if a save is killed,
blocking or not, the previous checkpoint is."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.processes import run_python

ROOT = Path(__file__).parents[3]

# One process forks for every write, since starting Python with TorchRec takes seconds. SIGKILL ends
# the child at a random line of the code that writes. The child reports what its model holds before
# each write, and that the write is done after it.
SCRIPT = """
import gc, os, random, signal, sys, threading, traceback
from pathlib import Path
import torch
import torch.distributed as dist
from tests.support.checkpoint_models import evaluate, make_tables, model_contents, train
from torchrec_hkv import checkpoint

torch.set_num_threads(1)
gc.freeze()  # children do not copy the pages of modules
folder, kills, seed, what = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
chain = folder / "chain"
device = torch.device("cpu")
PLACES = ("torchrec_hkv/checkpoint/", "torchrec_hkv/hash_table/", "torchrec_hkv/backends/",
          "torch/distributed/checkpoint/", "/shutil.py", "/json/")

def in_child(work):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            torch.manual_seed(0)
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            work(lambda said: os.write(writer, (repr(said) + "\\n").encode()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = [eval(line) for line in file.read().decode().splitlines()]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told

def contents(model):
    entries = sorted(map(repr, model_contents(model, "adam")))
    return hash(str((entries, evaluate(model, device).tolist())))

class Killing:
    def __init__(self, line):
        self.lines, self.line = 0, line

    def trace(self, frame, event, _):
        if not any(place in frame.f_code.co_filename for place in PLACES):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.line:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace

    def __enter__(self):
        threading.settrace(self.trace)  # for threads that begin
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(None)
        threading.settrace(None)

def write(version, line):
    def work(tell):
        model = make_tables(1, device, "row_wise", expire_after=2)
        writer = checkpoint.DeltaWriter(
            model, chain, model.fused_optimizer, keep_bases=1, threads=1,
            blocking=what != "write without blocking",
        )
        killing = Killing(line)
        for step in range(3):
            train(model, 0, device, range(10 * version + step, 10 * version + step + 1))
            tell(contents(model))
            with killing:
                done = writer.write()
                if what == "write without blocking":
                    train(model, 0, device, range(500, 502))
                    done.wait()
            tell("written")
        tell(killing.lines)
    return work

def save(version, line):
    def work(tell):
        model = make_tables(1, device, "row_wise", expire_after=2)
        killing = Killing(line)
        for step in range(3):
            train(model, 0, device, range(10 * version + step, 10 * version + step + 1))
            tell(contents(model))
            with killing:
                handle = checkpoint.save(
                    chain, model, model.fused_optimizer, threads=1, blocking=False
                )
                train(model, 0, device, range(500, 502))
                handle.wait()
            tell("written")
        tell(killing.lines)
    return work

def compact(into, line):
    def work(tell):
        killing = Killing(line)
        with killing:
            checkpoint.compact(chain, into, threads=1)
        tell(killing.lines)
    return work

def load(path):
    def work(tell):
        model = make_tables(1, device, "row_wise", expire_after=2)
        checkpoint.load(path, model, model.fused_optimizer)
        tell(contents(model))
    return work

def loaded(path=chain):
    code, told = in_child(load(path))
    assert code == 0
    return told[0]

choice = random.Random(seed)
begin = save if what == "save" else write
code, told = in_child(begin(0, -1))
assert code == 0
lines = told[-1]
before = told[-3]
old = new = 0
if what != "compact":
    assert loaded() == before
    for version in range(1, kills + 1):
        code, told = in_child(begin(version, choice.randrange(1, lines)))
        assert code in (0, -signal.SIGKILL), code
        states = [before] + [state for state in told if state != "written"]
        found = loaded()
        if told[-1] == "written":
            assert found == states[-1]
        else:
            assert found in states[-2:], told
        old += found != states[-1]
        new += found == states[-1]
        before = found
    code, _ = in_child(begin(99, -1))
    assert code == 0
else:
    code, told = in_child(compact(folder / "first", -1))
    assert code == 0 and loaded(folder / "first") == before
    lines = told[-1]
    for turn in range(kills):
        into = folder / "merged" if turn % 2 else None
        code, _ = in_child(compact(into, choice.randrange(1, lines)))
        assert code in (0, -signal.SIGKILL), code
        assert loaded() == before
        if (folder / "merged").exists():
            new += 1
            assert loaded(folder / "merged") == before
    code, _ = in_child(compact(folder / "merged", -1))
    assert code == 0 and loaded(folder / "merged") == before
    code, _ = in_child(write(99, -1))
    assert code == 0
# Whatever was left is cleared by the next writer.
if what == "save":
    assert os.listdir(folder) == ["chain"]
else:
    assert sorted(os.listdir(chain))[0] == f"base-{int(sorted(os.listdir(chain))[0][5:]):06d}"
print(len(os.listdir(chain)), lines, old, new)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["write", "write without blocking", "save", "compact"])
def test_killed_at_any_line(tmp_path, what):
    # TORCHREC_HKV_KILLS=50 takes minutes.
    kills = int(os.environ.get("TORCHREC_HKV_KILLS", "6"))
    seed = random.randrange(1 << 30)
    (script := tmp_path / "script.py").write_text(SCRIPT)
    (folder := tmp_path / "saved").mkdir()
    command = [str(script), str(folder), str(kills), str(seed), what]
    done = run_python(command, {**os.environ, "OMP_NUM_THREADS": "1"}, folder=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    held, lines, old, new = map(int, done.stdout.split())
    # A base, two deltas and the file that names the newest; or the parts of a checkpoint.
    assert held == (3 if what == "save" else 4)
    assert lines > 1000
    assert what == "compact" or old + new == kills
