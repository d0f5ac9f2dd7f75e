"""Reads single tensors of :mod:`torch.distributed.checkpoint`: returns what was saved, or
refuses."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchrec_hkv.checkpoint.metadata import read_dcp_metadata
from torchrec_hkv.checkpoint.reader import CheckedReader


class Opens:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def saved(folder, tensors):
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return CheckedReader(folder, read_dcp_metadata(folder))


def test_same_tensors(tmp_path):
    whole = torch.randn(6, 4)
    tensors = {
        "matrix": torch.randn(7, 3),
        "half": torch.randn(5).half(),
        "number": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "part of another": whole[2:4],
        "columns": torch.randn(4, 6).T,
    }
    reader = saved(tmp_path / "saved", tensors)
    for name, tensor in tensors.items():
        got = reader.read_tensor(name)
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor), name


def entry_of(reader, key):
    (index,) = (index for index in reader._metadata.storage_data if index.fqn == key)
    return reader._metadata.storage_data[index]


def test_refused(tmp_path):
    reader = saved(tmp_path / "saved", {"a": torch.zeros(64, 4), "b": torch.zeros(256).long()})
    info = entry_of(reader, "a")
    path = tmp_path / "saved" / info.relative_path
    whole = path.read_bytes()
    bad = pickle.dumps(Opens(tmp_path / "opened"))
    for data in (bytes(info.length), bad.ljust(info.length, b"\0")):
        path.write_bytes(whole[: info.offset] + data + whole[info.offset + info.length :])
        with pytest.raises(ValueError, match="is refused for its entry 'a'"):
            reader.read_tensor("a")
    path.write_bytes(whole)
    assert not (tmp_path / "opened").exists()
    assert torch.equal(reader.read_tensor("a"), torch.zeros(64, 4))
    # The metadata points to another tensor.
    other = entry_of(reader, "b")
    info.relative_path, info.offset, info.length = (
        other.relative_path, other.offset, other.length
    )  # fmt: skip
    with pytest.raises(ValueError, match="is refused for its entry 'a': it has 2048 bytes"):
        reader.read_tensor("a")
