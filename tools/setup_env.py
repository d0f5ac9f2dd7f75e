"""Creates the Python environment for the Makefile.

By default, it is a virtual environment in .venv with the packages of tools/requirements/: the CUDA
packages if TORCHREC_HKV_CUDA is 1, otherwise the CPU packages. A second run changes nothing unless
the requirements have changed. If TORCHREC_HKV_PYTHON is set to a Python, that Python is checked and
used without changes.

If something is missing, prints one sentence and exits with code 2.
"""

# Uses old syntax, so that an old Python can run the check of its version.

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "tools" / "requirements"
MODULES = "torch fbgemm_gpu torchrec numpy pybind11 setuptools pytest xdist hypothesis tqdm"
EXTRA_MODULES = {"docs": "furo, myst_parser, sphinx", "wheel": "auditwheel, wheel"}
# Variables that affect how setup.py builds. A change rebuilds the extension.
BUILD_VARIABLES = [
    "TORCHREC_HKV_CUDA",
    "TORCHREC_HKV_RELEASE",
    "TORCHREC_HKV_CPU_ARCH",
    "TORCHREC_HKV_DEBUG",
    "TORCHREC_HKV_SANITIZE",
    "TORCH_CUDA_ARCH_LIST",
    "CXX",
]


def fail(sentence):
    print("error: " + sentence, file=sys.stderr)
    sys.exit(2)


def check_machine(cuda):
    if sys.version_info < (3, 11):  # noqa: UP036
        fail(f"Python 3.11 or newer is needed, and {sys.executable} is {sys.version.split()[0]}.")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        fail(
            "The headers of this Python (Python.h) are missing;"
            " distributions ship them as python3-dev or python3-devel."
        )
    check_compiler()
    if cuda and nvcc() is None:
        fail(
            "The CUDA build needs nvcc: install the CUDA toolkit and set CUDA_HOME,"
            " or set TORCHREC_HKV_CUDA=0 for the CPU build."
        )


def check_compiler():
    compiler = os.environ.get("CXX") or "c++"
    command = [*compiler.split(), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    program = b"#include <bit>\nint main() { return std::popcount(0u); }\n"
    try:
        done = subprocess.run(
            command, input=program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        fail(f"A C++ compiler is needed, and '{compiler}' was not found.")
    if done.returncode != 0:
        fail(f"'{compiler}' does not compile C++20; GCC 11 or newer is needed.")


def nvcc():
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def read_requirements(cuda):
    files = ["gpu.txt" if cuda else "cpu.txt", "common.txt"]
    return [REQUIREMENTS / name for name in files], REQUIREMENTS / "torchrec.txt"


def install(cuda):
    """Installs packages to .venv, and returns its Python."""
    requirements = [REQUIREMENTS / ("gpu.txt" if cuda else "cpu.txt"), REQUIREMENTS / "common.txt"]
    torchrec = REQUIREMENTS / "torchrec.txt"
    key = hashlib.sha256(sys.version.encode())
    for path in [*requirements, torchrec]:
        key.update(path.read_bytes())
    python = VENV / "bin" / "python"
    stamp = VENV / "installed.txt"
    if python.exists() and stamp.exists() and stamp.read_text() == key.hexdigest():
        return python

    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError:
        fail("This Python has no venv module (ensurepip); distributions ship it as python3-venv.")
    print("Installing the Python packages into .venv; this takes some minutes.", flush=True)
    # Clears only an environment that this script has created.
    venv.create(VENV, with_pip=True, clear=stamp.exists())
    stamp.write_text("incomplete")
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    from_files = [word for path in requirements for word in ("-r", str(path))]
    for command in [[*pip, *from_files], [*pip, "--no-deps", "-r", str(torchrec)]]:
        if subprocess.run(command).returncode != 0:
            fail("pip could not install the packages; its message is above.")
    stamp.write_text(key.hexdigest())
    return python


def install_extra(python, name):
    """Installs the packages for `make docs` or `make wheel` to .venv."""
    requirements = REQUIREMENTS / f"{name}.txt"
    stamp = VENV / f"installed_{name}.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return
    print(f"Installing what `make {name}` needs into .venv.", flush=True)
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    if subprocess.run([*pip, "-r", str(requirements)]).returncode != 0:
        fail("pip could not install the packages; its message is above.")
    stamp.write_text(requirements.read_text())


def check_extra(python, name):
    """Refuses a Python that lacks packages for `make docs` or `make wheel`."""
    program = f"import {EXTRA_MODULES[name]}"
    if subprocess.run([str(python), "-c", program], stderr=subprocess.DEVNULL).returncode != 0:
        fail(f"{python} lacks packages that `make {name}` needs: {EXTRA_MODULES[name]}.")


def check_packages(python):
    """Returns the versions of Python, torch and its CUDA as one line of text."""
    # Reads torch's version file, because importing torch would take seconds on each run.
    program = f"""if True:
        import importlib.util as util, pathlib, runpy, sys
        missing = [name for name in {MODULES!r}.split() if util.find_spec(name) is None]
        if missing:
            sys.exit(", ".join(missing))
        torch = pathlib.Path(util.find_spec("torch").origin)
        version = runpy.run_path(str(torch.with_name("version.py")))
        print(sys.executable, sys.version.split()[0], version["__version__"], version["cuda"])
    """
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{python} lacks packages that are needed: {done.stderr.strip().splitlines()[-1]}.")
    return done.stdout.strip()


def check_cuda(versions):
    torch_cuda = versions.split()[-1]
    if torch_cuda == "None":
        fail(
            "The CUDA build needs a torch for CUDA, and the installed one is for the CPU:"
            " point pip at a package source with CUDA builds, or set TORCHREC_HKV_CUDA=0."
        )
    text = subprocess.run([nvcc(), "--version"], capture_output=True, text=True).stdout
    release = text.partition("release ")[2].partition(",")[0]
    if release.split(".")[0] != torch_cuda.split(".")[0]:
        fail(
            f"torch was built for CUDA {torch_cuda} and nvcc is {release}:"
            " install a toolkit of the same major version."
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--extra", choices=EXTRA_MODULES, help="also install what this target of make needs"
    )
    arguments = parser.parse_args()
    record = arguments.record
    cuda = os.environ.get("TORCHREC_HKV_CUDA", "0") == "1"

    check_machine(cuda)
    python = os.environ.get("TORCHREC_HKV_PYTHON") or install(cuda)
    if arguments.extra and os.environ.get("TORCHREC_HKV_PYTHON"):
        check_extra(python, arguments.extra)
    elif arguments.extra:
        install_extra(python, arguments.extra)
    versions = check_packages(python)
    if cuda:
        check_cuda(versions)
    lines = [f"{name}={os.environ.get(name, '')}" for name in BUILD_VARIABLES]
    text = "\n".join([*lines, versions, ""])
    if not record.exists() or record.read_text() != text:
        record.parent.mkdir(exist_ok=True)
        record.write_text(text)


if __name__ == "__main__":
    main()
