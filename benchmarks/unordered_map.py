"""``std::unordered_map`` from id to row on several threads, compiled at first use."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import ROOT
from torchrec_hkv.hash_table import Uniform
from torchrec_hkv.hash_table.initial_rows import table_seed


def compiler() -> str:
    """Returns the C++ compiler: ``CXX``, or ``c++``."""
    return os.environ.get("CXX", "c++")


def compiler_version() -> str:
    """Returns the first line of the compiler's version."""
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def _library() -> ctypes.CDLL:
    sources = (
        ROOT / "benchmarks" / "unordered_map.cpp",
        ROOT / "csrc" / "common" / "initial_rows.cpp",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "unordered_map.so"
        command = [compiler(), "-O3", "-march=native", "-std=c++20", "-ffp-contract=off", "-shared"]
        command += ["-fPIC", "-pthread", f"-I{ROOT / 'csrc'}", *map(str, sources)]
        command += ["-o", str(path)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.maps_make.restype = pointer
    library.maps_make.argtypes = [ctypes.c_int, number, number, number, ctypes.c_uint64]
    library.maps_make.argtypes += [ctypes.c_float, ctypes.c_float]
    library.maps_size.restype = number
    for name in ("find_or_insert", "find", "erase"):
        getattr(library, f"maps_{name}").argtypes = [pointer, pointer, number, pointer]
    library.maps_erase.argtypes = [pointer, pointer, number]
    library.maps_delete.argtypes = library.maps_size.argtypes = [pointer]
    return library


class UnorderedMaps:
    """One map per thread.

    Args:
        threads: number of threads.
        entries: number of entries for which the maps have buckets from the start.
        maximum: largest number of rows.
        dim: number of columns.
        name: name of the table whose initial rows new ids get.
        initializer: distribution of the initial rows.
    """

    def __init__(
        self, threads: int, entries: int, maximum: int, dim: int, name: str, initializer: Uniform
    ) -> None:
        self._library = _library()
        self.dim = dim
        seed = table_seed(0, name) % (1 << 64)
        low, high = initializer.low, initializer.high
        self._maps = self._library.maps_make(threads, entries, maximum, dim, seed, low, high)

    def close(self) -> None:
        """Frees the memory."""
        self._library.maps_delete(self._maps)
        self._maps = None

    def __len__(self) -> int:
        return self._library.maps_size(self._maps)

    def find(self, ids: Tensor) -> Tensor:
        """Returns addresses of rows, int64 ``[n]``; 0 for missing ids."""
        out = torch.empty_like(ids)
        self._library.maps_find(self._maps, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """Returns addresses of rows, int64 ``[n]``; new ids get initial rows."""
        out = torch.empty_like(ids)
        if not self._library.maps_find_or_insert(
            self._maps, ids.data_ptr(), len(ids), out.data_ptr()
        ):
            raise RuntimeError("the maps have no room for more rows.")
        return out

    def erase(self, ids: Tensor) -> None:
        """Erases ids."""
        self._library.maps_erase(self._maps, ids.data_ptr(), len(ids))

    def row(self, address: int) -> Tensor:
        """Returns a copy of the row at an address, float32 ``[dim]``."""
        return torch.tensor((ctypes.c_float * self.dim).from_address(address)[:])
