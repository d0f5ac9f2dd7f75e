"""Runs a build with ninja, and shows its progress on one line.

    python tools/build_progress.py --log FILE [--result PATTERN] -- COMMAND...

All output of the command goes to the log file. On a terminal, the line ``[18/54] ...`` is rewritten
in place; otherwise at most ten such lines are printed. If the command fails, the tool prints the
end of the first failed compilation's output and the path of the log. The exit code is that of the
command.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

NUMBERED = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")
# The output file of a failed compilation; newer versions of ninja add the exit code.
FAILED = re.compile(r"^FAILED: (?:\[code=-?\d+\] )?(.+?) *$")
SOURCE = re.compile(r"\S+\.(?:cpp|cu)\b")
# Largest number of lines that are printed without a terminal.
MAX_LINES = 10
# Number of printed lines of a failed command's output.
SHOWN_OUTPUT = 40
# Largest length of such a line; longer lines, such as command lines, are only in the log.
LONGEST_LINE = 500
CLEAR_LINE = "\r\x1b[2K"


class ProgressLine:
    """Shows how many compilations are finished.

    Args:
        output: stream for the line.
        is_terminal: whether to rewrite one line; otherwise prints a line now and then.
    """

    def __init__(self, output: TextIO, is_terminal: bool) -> None:
        self._output = output
        self._is_terminal = is_terminal
        self._began = time.monotonic()
        self._state = (0, 0, "")
        self._printed = 0

    @property
    def elapsed(self) -> str:
        """Returns the elapsed time as text: ``42 s``, ``3 min 07 s``."""
        seconds = int(time.monotonic() - self._began)
        return f"{seconds} s" if seconds < 60 else f"{seconds // 60} min {seconds % 60:02} s"

    def update(self, done: int, total: int, what: str) -> None:
        """Updates the state from a line of ninja."""
        self._state = (done, total, what)
        if self._is_terminal:
            self.redraw()
            return
        part = MAX_LINES * done // total if total else 0
        if part > self._printed:
            self._printed = part
            print(f"[{done:{len(str(total))}}/{total}] {self.elapsed}", file=self._output)
            self._output.flush()

    def redraw(self) -> None:
        """Writes the line again with the current time. Does nothing without a terminal."""
        if not self._is_terminal:
            return
        done, total, what = self._state
        count = f"[{done:{len(str(total))}}/{total}]" if total else "Starting,"
        line = f"{count} {self.elapsed}{'  ' if what else ''}{what}"
        # A line as wide as the terminal would wrap, and could not be rewritten.
        width = shutil.get_terminal_size().columns - 1
        self._output.write(CLEAR_LINE + line[:width])
        self._output.flush()

    def clear(self) -> None:
        """Removes the line from a terminal."""
        if self._is_terminal:
            self._output.write(CLEAR_LINE)
            self._output.flush()


class BuildOutput:
    """The output of the build so far: its progress, and the output of a failed command."""

    def __init__(self) -> None:
        self.failed_target: str | None = None
        self._failed_output: list[str] = []
        self._in_failed = False
        self._since_numbered: list[str] = []

    def add(self, line: str) -> tuple[int, int, str] | None:
        """Adds a line.

        Returns:
            (finished compilations, all compilations, source of the last one) for a line that ninja
            numbers; None for other lines.
        """
        numbered = NUMBERED.match(line)
        if numbered or line.startswith("ninja: "):
            self._in_failed = False
        if numbered:
            self._since_numbered = []
            sources = SOURCE.findall(numbered[3])
            what = os.path.relpath(sources[-1]) if sources else ""
            return int(numbered[1]), int(numbered[2]), what
        failed = FAILED.match(line)
        if failed:
            self._in_failed = self.failed_target is None
            self.failed_target = self.failed_target or failed[1]
        elif self._in_failed:
            self._failed_output.append(line)
        self._since_numbered.append(line)
        return None

    def of_failure(self) -> list[str]:
        """Returns the last lines of the failed compilation's output. If none failed, returns the
        last lines after the compilations, such as the linker's."""
        # The first line after FAILED is the command itself.
        lines = self._failed_output[1:] if self.failed_target else self._since_numbered
        return [line[:LONGEST_LINE] for line in lines[-SHOWN_OUTPUT:]]


def lines_of(build: subprocess.Popen[bytes], line: ProgressLine) -> Iterator[str]:
    """Yields lines of the build as they arrive; redraws the progress line each second."""
    stream = build.stdout.fileno()
    rest = b""
    while True:
        if not select.select([stream], [], [], 1.0)[0]:
            line.redraw()
            continue
        chunk = os.read(stream, 1 << 16)
        if not chunk:
            break
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (text.decode(errors="replace") for text in whole)
    if rest:
        yield rest.decode(errors="replace")


def run(command: Sequence[str], log: Path, result: str | None, output: TextIO) -> int:
    """Runs the build.

    Args:
        command: the build command.
        log: file for all output of the command.
        result: a pattern of the built file, which is printed at the end with its size.
        output: stream for the progress.

    Returns:
        The exit code of the command.
    """
    print(f"The output of the build goes to {log}.", file=output, flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    is_terminal = output.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    line = ProgressLine(output, is_terminal)
    seen = BuildOutput()
    with (
        log.open("w", buffering=1, errors="replace") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as build,
    ):
        line.redraw()
        for text in lines_of(build, line):
            file.write(f"{text}\n")
            progress = seen.add(text)
            if progress is not None:
                line.update(*progress)
    line.clear()
    if build.returncode == 0:
        print(f"Built in {line.elapsed}{_sizes(result)}.", file=output, flush=True)
        return 0
    for text in seen.of_failure():
        print(text, file=sys.stderr)
    what = f" at {os.path.basename(seen.failed_target)}" if seen.failed_target else ""
    print(
        f"error: The build failed{what} after {line.elapsed}; {log} has all its output.",
        file=sys.stderr,
        flush=True,
    )
    # The code is negative if a signal ended the command.
    return build.returncode if build.returncode > 0 else 1


def _sizes(pattern: str | None) -> str:
    """Returns the files that match a pattern, with their sizes."""
    files = sorted(Path().glob(pattern)) if pattern else []
    return "".join(f", {file} ({file.stat().st_size / 1e6:.1f} MB)" for file in files)


def main() -> int:
    """Parses the command line and runs the build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, required=True, metavar="FILE")
    parser.add_argument("--result", metavar="PATTERN", help="files that are built, such as '*.so'")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    try:
        return run(arguments.command, arguments.log, arguments.result, sys.stdout)
    except FileNotFoundError:
        parser.error(f"the command {arguments.command[0]!r} was not found")
    except KeyboardInterrupt:
        print("\nerror: Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
