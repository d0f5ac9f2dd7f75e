"""On a terminal of 80 columns, the terminal cuts or wraps nothing that the demo prints."""

import os
import pty
import re
import subprocess
import sys

import pytest

from tests.support.example_runs import ROOT, write_ratings

ESCAPES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


@pytest.mark.slow
def test_80_columns(tmp_path):
    main, side = pty.openpty()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    process = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "examples" / "train_movielens.py"), "--device", "cpu"),
            *("--data", str(write_ratings(tmp_path / "ratings.dat"))),
            *("--batch-size", "64", "--epochs", "1", "--runs", "hkv", "hkv-quarter"),
        ],
        env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=side,
        stderr=side,
    )
    os.close(side)
    chunks = []
    while True:
        try:
            chunk = os.read(main, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(main)
    assert process.wait(60) == 0
    output = ESCAPES.sub("", b"".join(chunks).decode())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", output)]
    assert [line for line in lines if len(line) > 80] == []
    # The live lines and the last one show all figures.
    assert any(re.fullmatch(r"hkv, a quarter, LFU .* \d+/50", line) for line in lines)
    end = output.index("hkv, a quarter, LFU: ")
    last = " ".join(output[end : end + 300].split())
    for name in ("samples/s", "train loss", "train AUC", "test AUC", "hit rate", "evictions"):
        assert name in last
