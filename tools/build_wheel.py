"""Builds a wheel that runs on other machines, and checks it with auditwheel.

    python tools/build_wheel.py --out dist

The wheel serves the Python and the minor version of torch that it is built with, on any x86-64-v2
machine. Without CUDA it has the kernels for x86-64-v3 as well. Libraries of torch and CUDA are not
copied into it: they come with torch. The tag, the sizes and the torch that it needs are printed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What torch brings along.
PROVIDED = ["libtorch*.so", "libc10*.so", "libcudart.so.*", "libcuda.so.*"]


def run(command: list[str], **variables: str) -> str:
    """Runs a command, and returns what it prints; exits with its error where it fails."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nerror: {' '.join(command)} failed with {done.returncode}.")
    return done.stdout


def build(out: Path) -> Path:
    """Builds the wheel and gives it a manylinux tag.

    Args:
        out: the folder that it is written to.

    Returns:
        Its path.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
        run([*wheel, "-w", folder, str(ROOT)], TORCHREC_HKV_RELEASE="1")
        (built,) = Path(folder).glob("*.whl")
        excluded = [word for name in PROVIDED for word in ("--exclude", name)]
        repair = [sys.executable, "-m", "auditwheel", "repair", *excluded]
        printed = run([*repair, "-w", str(out.resolve()), str(built)])
    found = re.search(r"Fixed-up wheel written to (.+\.whl)", printed)
    if found is None:
        sys.exit(f"{printed}\nerror: auditwheel wrote no wheel.")
    return Path(found[1])


def describe(wheel: Path) -> str:
    """The wheel's name, sizes and requirement of torch, as text."""
    lines = [f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB"]
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".so"):
                lines.append(f"  {info.filename}: {info.file_size / 1e6:.1f} MB unpacked")
            elif info.filename.endswith(".dist-info/METADATA"):
                text = archive.read(info).decode()
                lines += [
                    f"  {line}" for line in re.findall(r"^Requires-Dist: torch=.*", text, re.M)
                ]
    return "\n".join(lines)


def main() -> None:
    """Parses the command line, builds and describes the wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder (default: dist)")
    print(describe(build(parser.parse_args().out)))


if __name__ == "__main__":
    main()
