"""If a save is killed at any point, the previous checkpoint or the new one is whole."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]

# One process forks for every save, since starting Python with TorchRec takes seconds. SIGKILL ends
# the child at a random line of the code that saves.
SCRIPT = """
import gc, os, random, signal, sys, traceback
from pathlib import Path
import torch
import torch.distributed as dist
from tests.support.checkpoint_models import evaluate, make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.exchange import exchange
from torchrec_hkv.hash_table import MinFrequency

torch.set_num_threads(1)
gc.freeze()  # children do not copy the pages of modules
folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
path = folder / "checkpoint"
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
            os.write(writer, repr(work()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told.decode()

def model_of(version):
    model = make_tables(1, device, "row_wise", admission=MinFrequency(2, entries=128))
    train(model, 0, device, range(10 * version, 10 * version + 3))
    return model

def contents(model):
    return str((sorted(map(repr, model_contents(model, "adam"))), evaluate(model, device).tolist()))

def save(version, line):
    model = model_of(version)
    before = contents(model)
    lines = 0
    def trace(frame, event, _):
        nonlocal lines
        if not any(place in frame.f_code.co_filename for place in PLACES):
            return None
        if event == "line":
            lines += 1
            if lines == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    checkpoint.save(path, model, model.fused_optimizer, threads=1)
    sys.settrace(None)
    return lines, before

def load():
    model = model_of(9)
    checkpoint.load(path, model, model.fused_optimizer)
    return contents(model)

(folder / "1").mkdir()
(folder / "2").mkdir()
exchanges = exchange(folder / "1", folder / "2")
(folder / "1").rmdir()
(folder / "2").rmdir()

code, told = in_child(lambda: save(0, -1))
assert code == 0
lines, saved = eval(told)
code, told = in_child(lambda: save(0, -1))  # over an earlier one
lines = eval(told)[0]
choice = random.Random(seed)
# Some of them among the last lines, where the new checkpoint takes the place of the old one.
points = [choice.randrange(1, lines) for _ in range(kills - kills // 3)]
points += [lines - choice.randrange(120) for _ in range(kills // 3)]
version = old = new = 0
after = {}
for point in points:
    version = 1 + version % 3
    if version not in after:
        after[version] = eval(in_child(lambda: contents(model_of(version)))[1])
    code, _ = in_child(lambda: save(version, point))
    assert code in (0, -signal.SIGKILL), code
    # Whoever looks whether there is a checkpoint to go on from finds one.
    assert not exchanges or (path / "checkpoint.json").is_file(), f"line {point}"
    code, told = in_child(load)
    assert code == 0, f"line {point}"
    found = eval(told)
    if found == after[version]:
        saved, new = found, new + 1
    else:
        assert found == saved, f"line {point}"
        old += 1
# Whatever the killed saves left is cleared by the next.
assert in_child(lambda: save(0, -1))[0] == 0
assert os.listdir(folder) == ["checkpoint"]
print(lines, old, new)
"""


def _run(tmp_path, kills, seed):
    (script := tmp_path / "script.py").write_text(SCRIPT)
    (folder := tmp_path / "saved").mkdir()
    command = [str(script), str(folder), str(kills), str(seed)]
    done = run_python(command, {**os.environ, "OMP_NUM_THREADS": "1"}, folder=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(number) for number in done.stdout.split()]


@pytest.mark.slow
def test_killed_at_any_line(tmp_path):
    # TORCHREC_HKV_KILLS=50 takes minutes.
    kills = int(os.environ.get("TORCHREC_HKV_KILLS", "6"))
    lines, old, new = _run(tmp_path, kills, random.randrange(1 << 30))
    assert lines > 2000
    assert old + new == kills
    assert old > kills // 3
