"""The reader closes the output early, as in ``torchrec-hkv env | head``."""

import os
import subprocess
import sys


def test_a_closed_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "torchrec_hkv.cli", "env"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    assert done.returncode == 0
    assert "Broken pipe" not in done.stderr
    assert "Traceback" not in done.stderr
