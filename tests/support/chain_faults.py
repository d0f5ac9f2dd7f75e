"""Faults of chains of deltas: killed processes, and damaged files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.support.damage import cut
from torchrec_hkv.checkpoint.chain import Chain
from torchrec_hkv.checkpoint.layers import read_saved, saved_shards
from torchrec_hkv.checkpoint.record import TENSORS


@contextlib.contextmanager
def killed_after(calls: int) -> Iterator[None]:
    """Kills the process at a call of a C function; calls are counted over all threads."""
    left = [calls]

    def count(frame: object, event: str, _: object) -> None:
        if event == "c_call":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def spoil(root: Path, key: str, what: str, random: Random) -> bool:
    """Damages a file or folder that the newest state of a chain needs.

    Args:
        root: the folder of the chain.
        key: full name of the table.
        what: "bit", "cut", "longer", "lost", "folder", "swapped" or "doubled".
        random: chooses what is damaged.

    Returns:
        Whether the damage was possible.
    """
    layers = read_saved(root)
    folders = [folder for folder, _ in layers]
    if what == "folder":
        shutil.rmtree(random.choice(folders))
        return True
    if what in ("swapped", "doubled"):
        if len(folders) < 2:
            return False
        one, other = random.sample(folders, 2)
        if what == "swapped":
            spare = root / "spare"
            one.rename(spare)
            other.rename(one)
            spare.rename(other)
        else:
            shutil.rmtree(other)
            shutil.copytree(one, other)
        return True
    # A load reads the tensors of the newest checkpoint only. Of a shard's deltas, it reads those
    # since the last one that holds the whole shard.
    read = {folders[0] / TENSORS, *folders}
    for shard in saved_shards(layers, key):
        read |= {shard.folder, *shard.earlier}
    paths = [
        path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent in read
    ]
    if (root / "deltas.json").exists():  # missing if the first write was killed
        paths.append(root / "deltas.json")
    path = random.choice(paths)
    data = bytearray(path.read_bytes())
    if what == "lost":
        if path.name == "deltas.json" and len(Chain(root).names()) == 1:
            return False  # like after a kill of the first write
        path.unlink()
        return True
    if what == "longer":
        data += b"x"
    elif not data:
        return False
    elif what == "cut":
        data = cut(data, random)
    else:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return True
