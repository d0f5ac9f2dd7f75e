"""A build's progress: one line on a terminal, several in a log, and the end of a failure's
output."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "build_progress.py"
# The output of ninja -v for a compilation.
COMPILE = "c++ -MMD -MF @.o.d -I/csrc -c @.cpp -o @.o -O3"

SUCCESS = """
    print("running build_ext")
    for i in range(1, 55):
        print(f"[{i}/54] COMPILE".replace("@", f"csrc/file_{i}"))
    print("g++ -shared -o _C.so")
    open("_C.abi.so", "w").write("x" * 2_100_000)
"""
FAILURE = """
    print("[1/3] COMPILE".replace("@", "csrc/good"))
    print("[2/3] COMPILE".replace("@", "csrc/bad"))
    print("FAILED: [code=1] /build/csrc/bad.o")
    print("COMPILE".replace("@", "csrc/bad") + " -DLONG" * 1000)
    for i in range(100):
        print(f"bad.cpp:{i}: error: no such thing")
    print("[3/3] COMPILE".replace("@", "csrc/other"))
    print("other.cpp:1: warning: something else")
    print("FAILED: /build/csrc/third.o")
    print("c++ third.cpp")
    print("third.cpp:7: error: third")
    print("ninja: build stopped: subcommand failed.")
    print("Traceback (most recent call last):")
    raise SystemExit(3)
"""
LINKER = """
    print("[1/1] COMPILE".replace("@", "csrc/good"))
    print("ld: cannot find -lnothing")
    raise SystemExit(1)
"""
EARLY = """
    raise SystemExit("error: TORCHREC_HKV_CUDA=1 needs a CUDA toolkit.")
"""


def command(script: str, *options: str) -> list[str]:
    code = textwrap.dedent(script).replace("COMPILE", COMPILE)
    tool = [sys.executable, str(TOOL), "--log", "build/extension.log", *options]
    return [*tool, "--", sys.executable, "-u", "-c", code]


def build(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(script, *options), cwd=folder, capture_output=True, text=True, timeout=60
    )


def on_terminal(script: str, folder: Path, columns: int, term: str = "xterm") -> tuple[str, int]:
    """The output on a terminal, and the exit code."""
    main, side = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": term}
    process = subprocess.Popen(command(script), cwd=folder, stdout=side, stderr=side, env=env)
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
    return b"".join(chunks).decode(), process.wait(60)


def test_a_log_gets_ten_lines_at_most(tmp_path):
    done = build(SUCCESS, tmp_path, "--result", "_C.*.so")
    assert done.returncode == 0, done.stderr
    first, *progress, last = done.stdout.splitlines()
    assert first == "The output of the build goes to build/extension.log."
    assert len(progress) == 10
    assert re.fullmatch(r"\[ 6/54\] \d+ s", progress[0])
    assert re.fullmatch(r"\[54/54\] \d+ s", progress[-1])
    assert re.fullmatch(r"Built in \d+ s, _C\.abi\.so \(2\.1 MB\)\.", last)
    assert done.stderr == ""


def test_the_log_has_all_output(tmp_path):
    build(SUCCESS, tmp_path)
    lines = (tmp_path / "build" / "extension.log").read_text().splitlines()
    assert len(lines) == 56
    assert lines[0] == "running build_ext"
    assert lines[1] == "[1/54] " + COMPILE.replace("@", "csrc/file_1")


def test_a_terminal_has_one_line_that_is_rewritten(tmp_path):
    output, code = on_terminal(SUCCESS, tmp_path, columns=40)
    assert code == 0
    drawn = output.split("\r\x1b[2K")
    assert any(re.fullmatch(r"\[18/54\] \d+ s  csrc/file_18.cpp", line) for line in drawn)
    # The line neither wraps nor continues on the next one.
    assert all(len(line) < 40 and "\n" not in line for line in drawn[1:-1])
    assert re.match(r"Built in \d+ s", drawn[-1])


def test_a_narrow_terminal_cuts_the_line(tmp_path):
    output, _ = on_terminal(SUCCESS, tmp_path, columns=20)
    assert max(len(line) for line in output.split("\r\x1b[2K")[1:-1]) == 19


def test_a_terminal_that_can_not_rewrite_gets_lines(tmp_path):
    output, _ = on_terminal(SUCCESS, tmp_path, columns=80, term="dumb")
    assert "\x1b" not in output
    assert output.count("/54]") == 10


@pytest.mark.slow
def test_the_time_goes_on_while_nothing_is_done(tmp_path):
    slow = 'import time; print("[1/2] c++ a.cpp"); time.sleep(2.5); print("[2/2] c++ b.cpp")'
    output, _ = on_terminal(slow, tmp_path, columns=80)
    assert "[1/2] 1 s  a.cpp" in output
    assert "[1/2] 2 s  a.cpp" in output


def test_a_failure_shows_the_end_of_that_commands_output(tmp_path):
    done = build(FAILURE, tmp_path)
    assert done.returncode == 3
    *shown, last = done.stderr.splitlines()
    assert shown == [f"bad.cpp:{i}: error: no such thing" for i in range(60, 100)]
    assert re.fullmatch(
        r"error: The build failed at bad\.o after \d+ s; build/extension\.log has all its output\.",
        last,
    )
    assert "third.cpp:7" in (tmp_path / "build" / "extension.log").read_text()


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        (LINKER, "ld: cannot find -lnothing"),
        (EARLY, "error: TORCHREC_HKV_CUDA=1 needs a CUDA toolkit."),
    ],
    ids=["the linker", "before the first compilation"],
)
def test_a_failure_outside_a_compilation(script, shown, tmp_path):
    done = build(script, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == shown
    assert "error: The build failed after" in done.stderr


def test_a_build_that_a_signal_ends_fails(tmp_path):
    done = build("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert done.returncode == 1
    assert "error: The build failed" in done.stderr


def test_a_command_that_is_not_there(tmp_path):
    tool = [sys.executable, str(TOOL), "--log", "log", "--", "no-such-build"]
    done = subprocess.run(tool, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error: the command 'no-such-build' was not found" in done.stderr


def test_an_interrupt_is_a_sentence(tmp_path):
    # Ctrl-C signals all processes of the terminal's foreground group.
    process = subprocess.Popen(
        command('import time; print("[1/2] c++ a.cpp"); time.sleep(60)'),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Background processes of a shell ignore the signal, and so would this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = tmp_path / "build" / "extension.log"
    end = time.monotonic() + 30
    while not (log.exists() and "[1/2]" in log.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.endswith("error: Interrupted.\n")
    assert "Traceback" not in errors
