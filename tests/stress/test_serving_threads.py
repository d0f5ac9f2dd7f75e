"""Threads read a table while another one makes new versions of it, under ThreadSanitizer.

    TORCHREC_HKV_THREADS=1 pytest tests/stress/test_serving_threads.py

Builds only the lookups, without torch, which is not checked. Takes half a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not os.environ.get("TORCHREC_HKV_THREADS"), reason="TORCHREC_HKV_THREADS is not set"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


def test_readers_and_a_writer(tmp_path):
    sources = ["serving/lookup_cpu.cpp", "serving/build_index_cpu.cpp"]
    sources += ["common/initial_rows.cpp", "common/parallel.cpp"]
    program = tmp_path / "threads"
    command = ["g++", "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-march=x86-64-v3"]
    command += [f"-I{ROOT / 'csrc'}", str(Path(__file__).with_name("serving_threads.cpp"))]
    command += [str(ROOT / "csrc" / source) for source in sources]
    subprocess.run([*command, "-pthread", "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " calls, " in done.stdout
    assert "WARNING: ThreadSanitizer" not in done.stderr
