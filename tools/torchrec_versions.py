#!/usr/bin/env python3
"""Runs the tests with the marker ``compat`` with each supported TorchRec, on the CPU.

    tools/torchrec_versions.py                 # all versions, each with its own torch
    tools/torchrec_versions.py 1.6 1.9         # these
    tools/torchrec_versions.py --this-torch    # TorchRec's Python alone, beside the torch at hand

By default, a version gets a virtual environment with its torch and FBGEMM, and a copy of the tree
with the extension built for that torch. Both are kept in ``--folder`` for the next run. If they
can't be installed, and with ``--this-torch``, only the version's Python files are used, together
with the torch, FBGEMM and extension of the Python that runs this tool. This takes seconds to
prepare instead of an hour, and the Python files differ most between versions.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = ROOT / "tools" / "requirements" / "common.txt"


@dataclass(frozen=True)
class Release:
    """Versions that belong together; ``more`` are packages that only this TorchRec needs."""

    torchrec: str
    torch: str
    fbgemm: str
    more: tuple[str, ...] = ()


# For torchrec.models.
_IOPATH = ("iopath==0.1.10", "portalocker==3.2.0")


RELEASES = {
    "1.6": Release("1.6.1", "2.11.0", "1.6.0", _IOPATH),
    "1.7": Release("1.7.0", "2.12.0", "1.7.0", _IOPATH),
    "1.8": Release("1.8.0", "2.13.0", "1.8.0"),
    "1.9": Release("1.9.2", "2.14.0", "1.9.0"),
}


class Failed(Exception):
    """A step failed; the message names the step and its output file."""


class NotInstalled(Failed):
    """A version's own torch can't be installed here."""


def run(log: Path, command: list[str], cwd: Path = ROOT, **environment: str) -> None:
    """Runs a command and writes its output to a file.

    Raises:
        Failed: the command ended with an error.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=cwd, stdout=file, stderr=file, env={**os.environ, **environment}
        ).returncode
    if code:
        raise Failed(f"{log.stem} ended with {code}; its output is in {log}")


def packages() -> list[str]:
    """Returns the other packages for the tests, except setuptools, whose version depends on
    torch."""
    lines = [line.partition("#")[0].strip() for line in COMMON.read_text().splitlines()]
    skipped = ("setuptools", "ruff", "clang-format")
    return [line for line in lines if line and re.split("[=<>]", line)[0] not in skipped]


def own_environment(folder: Path, release: Release) -> tuple[Path, Path]:
    """Creates or updates the environment and the tree of a release, and returns its Python and
    tree.

    Raises:
        NotInstalled: its torch can't be installed.
        Failed: the extension does not build.
    """
    python = folder / "venv" / "bin" / "python"
    stamp = folder / "installed.txt"
    requirements = [f"torch=={release.torch}", f"fbgemm-gpu-cpu=={release.fbgemm}", *packages()]
    requirements += release.more
    text = "\n".join([*requirements, f"torchrec=={release.torchrec}"])
    if not stamp.is_file() or stamp.read_text() != text:
        venv.create(folder / "venv", with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        torchrec = f"torchrec=={release.torchrec}"
        try:
            run(folder / "install.log", [*pip, "setuptools", *requirements])
            run(folder / "install_torchrec.log", [*pip, "--no-deps", torchrec])
        except Failed as reason:
            raise NotInstalled(str(reason)) from None
        stamp.write_text(text)
    tree = folder / "tree"
    copy_tree(tree)
    build = [str(python), "setup.py", "build_ext", "--inplace"]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # where ninja is
    run(folder / "build.log", build, tree, TORCHREC_HKV_CUDA="0", PATH=path)
    return python, tree


def copy_tree(target: Path) -> None:
    """Updates a copy of the tree; unchanged files keep their modification times, for ninja."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source, copy = ROOT / name, target / name
        if copy.is_file() and copy.read_bytes() == source.read_bytes():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    for folder in ("csrc", "tests", "torchrec_hkv"):
        for old in (target / folder).rglob("*.*"):
            is_removed = old.relative_to(target).as_posix() not in names
            if is_removed and old.suffix in (".py", ".cpp", ".h"):
                old.unlink()


def python_alone(folder: Path, release: Release) -> Path:
    """Installs TorchRec's Python files to a folder, and returns the folder.

    Raises:
        Failed: they can't be installed.
    """
    site = folder / f"torchrec-{release.torchrec}"
    if not site.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        requirements = [f"torchrec=={release.torchrec}", *release.more]
        command = [*pip, "--no-deps", "--target", str(site), *requirements]
        run(folder / "install_torchrec.log", command)
    return site


def test(log: Path, python: Path, path: list[Path], tree: Path, more: list[str]) -> str:
    """Runs the tests.

    Returns:
        pytest's last line.

    Raises:
        Failed: a test failed.
    """
    command = [str(python), "-m", "pytest", "-q", "-m", "compat and not gpu", *more]
    command += ["-p", "no:cacheprovider"]
    run(log, command, tree, PYTHONPATH=os.pathsep.join(map(str, [*path, tree])))
    return log.read_text().strip().splitlines()[-1]


def check(name: str, args: argparse.Namespace) -> bool:
    """Runs the tests with a version, and prints the result."""
    release, folder, begin = RELEASES[name], args.folder.resolve() / name, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    python, tree, path = Path(sys.executable), ROOT, []
    beside = "its Python beside the torch at hand"
    try:
        if not args.this_torch:
            alone, beside = beside, f"torch {release.torch}"
            try:
                python, tree = own_environment(folder, release)
            except NotInstalled as reason:
                beside = alone
                print(
                    f"TorchRec {release.torchrec}: no torch {release.torch}: {reason}", flush=True
                )
        if tree == ROOT:
            path = [python_alone(folder, release)]
        result = test(folder / "tests.log", python, path, tree, args.pytest)
    except Failed as reason:
        print(f"TorchRec {release.torchrec}, {beside}: FAILED: {reason}", flush=True)
        return False
    seconds = round(time.monotonic() - begin)
    print(f"TorchRec {release.torchrec}, {beside}: {result} ({seconds} s in all)", flush=True)
    return True


def main() -> int:
    """Parses arguments, tests the versions, and returns 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(RELEASES))
    parser.add_argument("--this-torch", action="store_true", help="TorchRec's Python alone")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--pytest", type=shlex.split, default=[], help="arguments, in one word")
    args = parser.parse_args()
    versions = args.versions or list(RELEASES)
    if unknown := [name for name in versions if name not in RELEASES]:
        parser.error(f"TorchRec {unknown[0]} is not supported: {', '.join(RELEASES)} are.")
    passed = {name: check(name, args) for name in versions}
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
