"""Builds the extension ``torchrec_hkv._C`` from ``csrc/``; the rest is in ``pyproject.toml``.

Environment variables:
    TORCHREC_HKV_CUDA: 1 builds the CUDA kernels, 0 leaves them out. By default they are built when
        torch was built for CUDA and a CUDA toolkit is found.
    TORCHREC_HKV_RELEASE: 1 builds for other machines: for all supported GPU architectures, and for
        x86-64-v2. A CPU build has a second extension for x86-64-v3, and takes the one that suits
        the CPU (``torchrec_hkv/cpu_variant.py``). The package then requires the torch that it was
        built against, and names it in its version, as in ``0.1.0+torch2.13.cu130``.
    TORCHREC_HKV_CPU_ARCH: GCC's ``-march`` for the CPU kernels; empty for the compiler's default.
        By default ``x86-64-v3`` on a machine with AVX2.
    TORCHREC_HKV_DEBUG: 1 builds with debug information, line numbers of CUDA kernels for profilers,
        and symbols. The build takes about twice as long, and the extension is 30 times as large.
    TORCHREC_HKV_SANITIZE: ``address`` or ``thread`` builds the CPU kernels under that sanitizer of
        the compiler; ``tools/sanitize.sh`` does so in a folder of its own and runs the tests there.
    TORCH_CUDA_ARCH_LIST: PyTorch's own; by default the GPU that is present, or 9.0 without one.
    MAX_JOBS: PyTorch's own; compilations at a time.
"""

import importlib.util
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import (
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    CUDAExtension,
    include_paths,
)

ROOT = Path(__file__).resolve().parent
RELEASE_CUDA_ARCHS = "8.0;9.0;10.0"
DEFAULT_CUDA_ARCH = "9.0"
SANITIZERS = ("address", "thread")
BINDINGS_OF_FILE = 8  # sources that are compiled together
V3 = "torchrec_hkv._v3._C"


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def files(pattern: str) -> list[str]:
    """Files of ``csrc/`` as setuptools wants them: relative and in a stable order."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(pattern))


def torch_sources() -> list[str]:
    """The sources that include torch's headers."""
    return [*files("runtime/**/*.cpp"), *files("bindings/**/*.cpp")]


def bindings() -> list[str]:
    """Generated files, each of which includes a few of the sources that need torch.

    Reading torch's headers takes four to twelve seconds, and compiling what a source adds one or
    two. Sources that are compiled together share the headers. Their unnamed namespaces are one, so
    names in them must differ.
    """
    heavy = {"pybind.h": [], "custom_function.h": [], "": []}
    for source in torch_sources():
        text = (ROOT / source).read_text()
        heavy[next(name for name in heavy if name in text)].append(Path(source))
    *shared, rest = heavy.values()
    for at in range(0, len(rest), BINDINGS_OF_FILE):
        shared.append(rest[at : at + BINDINGS_OF_FILE])
    return [
        together(Path("bindings", f"bindings_{number}.cpp"), part)
        for number, part in enumerate(filter(None, shared), 1)
    ]


def together(path: Path, parts: list[Path]) -> str:
    """A generated file in ``build/`` that includes sources; returns its path."""
    path = Path("build") / path
    (ROOT / path.parent).mkdir(parents=True, exist_ok=True)
    text = "".join(f'#include "{part.relative_to("csrc").as_posix()}"\n' for part in parts)
    # A file that says the same keeps its time, so that it is not compiled again.
    if not (ROOT / path).exists() or (ROOT / path).read_text() != text:
        (ROOT / path).write_text(text)
    return str(path)


def cuda_units() -> list[list[Path]]:
    """The CUDA sources that are compiled together (``csrc/cuda_units.txt``)."""
    lines = (ROOT / "csrc/cuda_units.txt").read_text().splitlines()
    units = [line.split() for line in lines if line and not line.startswith("#")]
    return [[Path("csrc", name) for name in unit] for unit in units]


def sources(*patterns: str) -> list[str]:
    """What is compiled."""
    found = {name for pattern in patterns for name in files(pattern)} - set(torch_sources())
    made = bindings()
    if "*.cu" in patterns:
        units = cuda_units()
        made += [together(Path("cuda", f"unit_{n}.cu"), unit) for n, unit in enumerate(units, 1)]
        found -= {str(source) for unit in units for source in unit}
    return [*made, *sorted(found)]


def wants_cuda() -> bool:
    toolkit = torch.version.cuda is not None and CUDA_HOME is not None
    if "TORCHREC_HKV_CUDA" not in os.environ:
        return toolkit
    if is_set("TORCHREC_HKV_CUDA") and not toolkit:
        missing = "a CUDA toolkit (nvcc)" if torch.version.cuda else "a torch built for CUDA"
        sys.exit(f"error: TORCHREC_HKV_CUDA=1 needs {missing}, which is not here.")
    return is_set("TORCHREC_HKV_CUDA")


def cpu_arch() -> str:
    if "TORCHREC_HKV_CPU_ARCH" in os.environ:
        return os.environ["TORCHREC_HKV_CPU_ARCH"]
    if platform.machine() != "x86_64":
        return ""
    if is_set("TORCHREC_HKV_RELEASE"):
        return "x86-64-v2"
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ""
    return "x86-64-v3" if {"avx2", "bmi2", "fma"} <= set(flags) else ""


def sanitizer_flags() -> list[str]:
    """For the compiler and the linker; none by default."""
    sanitizer = os.environ.get("TORCHREC_HKV_SANITIZE", "")
    if not sanitizer:
        return []
    if sanitizer not in SANITIZERS:
        sys.exit(
            f"error: TORCHREC_HKV_SANITIZE is {sanitizer!r}, but must be one of "
            f"{', '.join(SANITIZERS)}, or empty."
        )
    if wants_cuda():
        sys.exit(
            f"error: TORCHREC_HKV_SANITIZE={sanitizer} makes a CPU build: it needs "
            "TORCHREC_HKV_CUDA=0."
        )
    return [f"-fsanitize={sanitizer}"]


def choose_cuda_archs() -> None:
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return
    archs = DEFAULT_CUDA_ARCH
    if is_set("TORCHREC_HKV_RELEASE"):
        archs = RELEASE_CUDA_ARCHS
    elif torch.cuda.is_available():
        archs = "{}.{}".format(*torch.cuda.get_device_capability())
    os.environ["TORCH_CUDA_ARCH_LIST"] = archs


def headers_outside_toolkit() -> list[str]:
    """Where torch's wheels keep the CUDA library headers, for a toolkit that comes without them."""
    if (Path(CUDA_HOME) / "include" / "cublas_v2.h").exists():
        return []
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else []
    return [str(p.parent) for root in roots for p in Path(root).glob("*/include/cublas_v2.h")]


def compression() -> list[str]:
    """nvcc's options for kernels in a fifth of the default bytes; none before CUDA 12.8."""
    try:
        nvcc = Path(CUDA_HOME or "", "bin", "nvcc")
        known = subprocess.run([nvcc, "--help"], capture_output=True, text=True).stdout
    except OSError:  # torch reports a missing nvcc
        return []
    return ["--compress-mode=size"] if "--compress-mode" in known else []


def shared_cpp_runtime() -> list[str]:
    """Names the shared C++ runtime, so that the linker does not take a static one.

    Some toolchains have only ``libstdc++.a``. A second copy of the runtime beside torch's crashes
    where the two meet, as when a number is formatted for an error message.
    """
    compiler = os.environ.get("CXX", "g++").split()
    try:
        found = subprocess.run(
            [*compiler, "-print-file-name=libstdc++.so.6"], capture_output=True, text=True
        )
    except OSError:
        return []
    return ["-l:libstdc++.so.6"] if os.path.isabs(found.stdout.strip()) else []


def has_two_variants() -> bool:
    """Whether the build has an extension for x86-64-v3 beside that for x86-64-v2."""
    return (
        is_set("TORCHREC_HKV_RELEASE")
        and "TORCHREC_HKV_CPU_ARCH" not in os.environ
        and platform.machine() == "x86_64"
        and not wants_cuda()
    )


def extension(name: str = "torchrec_hkv._C", arch: str | None = None):
    """An extension.

    Args:
        name: its module.
        arch: GCC's ``-march``; None: that of the environment and the machine.
    """
    cuda = wants_cuda()
    # torch's headers do not pass -Wextra; as system headers they are not asked to.
    system = [f"-isystem{path}" for path in include_paths("cuda" if cuda else "cpu")]
    # No contraction: a row must come out the same whether or not the compiler finds an FMA.
    cxx = [
        "-O3",
        "-std=c++20",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fvisibility=hidden",
        "-pthread",
        # CPython's own flags often have -g, which doubles the time of a build; the last one counts.
        "-g" if is_set("TORCHREC_HKV_DEBUG") else "-g0",
    ]
    cxx += ["-Wall", "-Wextra", *system]
    # torch's headers then include those operators that they use, not all.
    cxx.append("-DAT_PER_OPERATOR_HEADERS")
    if arch := cpu_arch() if arch is None else arch:
        cxx.append(f"-march={arch}")
        if arch == "x86-64-v2":  # wider vectors are passed within the extension only
            cxx.append("-Wno-psabi")
    sanitizer = sanitizer_flags()
    if sanitizer:  # stacks that tell where, at a bearable speed
        cxx += [*sanitizer, "-O1", "-g1", "-fno-omit-frame-pointer"]
    # Sanitizers name functions in their reports.
    keeps_symbols = is_set("TORCHREC_HKV_DEBUG") or sanitizer
    strip = [] if keeps_symbols else ["-Wl,-s"]
    common = {
        "name": name,
        "include_dirs": [str(ROOT / "csrc")],
        "depends": [
            *files("*.h"),
            *files("*.cuh"),
            *files("*.cu"),
            *torch_sources(),
            "csrc/cuda_units.txt",
            "setup.py",
        ],
        "extra_link_args": ["-pthread", *shared_cpp_runtime(), *strip, *sanitizer],
    }
    if not cuda:
        return CppExtension(sources=sources("*.cpp"), extra_compile_args={"cxx": cxx}, **common)
    choose_cuda_archs()
    common["include_dirs"] += headers_outside_toolkit()
    nvcc = ["-O3", "-std=c++20", "--expt-relaxed-constexpr"]
    if is_set("TORCHREC_HKV_DEBUG"):
        nvcc.append("-lineinfo")
    if is_set("TORCHREC_HKV_RELEASE"):
        nvcc += compression()
    nvcc += ["-Xcompiler=-ffp-contract=off,-fvisibility=hidden,-Wall"]
    return CUDAExtension(
        sources=sources("*.cpp", "*.cu"),
        define_macros=[("TORCHREC_HKV_CUDA", None)],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        **common,
    )


class BuildVariants(BuildExtension):
    """Keeps the objects of the second extension apart from those of the first."""

    def run(self) -> None:
        super().run()
        package = Path(self.get_ext_fullpath("torchrec_hkv._C")).parent
        (package / "_built_for.py").write_text(built_for())
        if not has_two_variants():  # an earlier build may have had them; its v3 would be loaded
            for path in (package / "_v3").glob("_C.*.so"):
                path.unlink()

    def build_extension(self, ext) -> None:
        temp = self.build_temp
        if ext.name == V3:
            self.build_temp = os.path.join(temp, "v3")
            os.makedirs(self.build_temp, exist_ok=True)
        super().build_extension(ext)
        self.build_temp = temp


def built_for() -> str:
    """A module that says what the extension was built for (``torchrec_hkv/torch_match.py``)."""
    values = {"TORCH": str(torch.__version__), "CUDA": None, "CUDA_ARCHS": None}
    if wants_cuda():
        values["CUDA"] = torch.version.cuda
        values["CUDA_ARCHS"] = os.environ["TORCH_CUDA_ARCH_LIST"]
    lines = [f"{name} = {value!r}\n" for name, value in values.items()]
    return '"""What setup.py built the extension for."""\n\n' + "".join(lines)


def torch_minor() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def torch_requirement() -> str:
    """The torch that a build runs with.

    torch keeps its C++ interface within a minor version only, so a wheel serves one of them.
    """
    if not is_set("TORCHREC_HKV_RELEASE"):
        return "torch>=2.11,<2.15"
    return f"torch=={torch_minor()}.*"


def version() -> str:
    """The version; for other machines with the torch and CUDA, which wheels' names then show."""
    public = runpy.run_path(str(ROOT / "torchrec_hkv" / "_version.py"))["__version__"]
    if not is_set("TORCHREC_HKV_RELEASE"):
        return public
    device = f"cu{torch.version.cuda.replace('.', '')}" if wants_cuda() else "cpu"
    return f"{public}+torch{torch_minor()}.{device}"


extensions = [extension()]
if has_two_variants():
    extensions.append(extension(V3, "x86-64-v3"))
setup(
    version=version(),
    ext_modules=extensions,
    cmdclass={"build_ext": BuildVariants},
    install_requires=[torch_requirement()],
)
