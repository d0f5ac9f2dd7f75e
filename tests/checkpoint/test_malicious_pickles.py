"""A load refuses a checkpoint that asks to run code: nothing runs, and nothing changes."""

from __future__ import annotations

import datetime
import io
import json
import os
import pickle
import zlib

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from tests.support.checkpoint_models import make_tables, model_contents, train
from tests.support.mutations import write
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.metadata import _Unpickler


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _save(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    model.module.register_buffer("marker", torch.arange(7.0))
    train(model, rank, device, range(2))
    checkpoint.save(folder, model, model.fused_optimizer)


def _refused(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    model.module.register_buffer("marker", torch.zeros(7))
    train(model, rank, device, range(3))
    before = model_contents(model, "adam"), model.module.marker.clone()
    with pytest.raises(ValueError, match="nothing that it names was run") as refusal:
        checkpoint.load(folder, model, model.fused_optimizer)
    assert before[0] == model_contents(model, "adam")
    assert before[1].equal(model.module.marker)
    return str(refusal.value)


def _replace(folder, name, data):
    """Writes a file of tensors, and its size and checksum into the record."""
    (folder / name).write_bytes(data)
    record = json.loads((folder / "checkpoint.json").read_text())
    record["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    write(folder / "checkpoint.json", record)


def _replace_entry(folder, key, entry):
    """Replaces an entry by another one, which is appended to its file."""
    path = folder / "tensors" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == key)
    info = metadata.storage_data[index]
    name = f"tensors/{info.relative_path}"
    data = (folder / name).read_bytes()
    info.offset, info.length = len(data), len(entry)
    _replace(folder, name, data + entry)
    _replace(folder, "tensors/.metadata", pickle.dumps(metadata))
    return folder / name


class _ByName:
    """Pickles as an enumeration member of Python 3.11.0 to 3.11.3 does."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_members_by_name():
    member = _ByName(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")
    found = _Unpickler(pickle.dumps(member), "m").load()
    assert type(found).__name__ == "_MEM_FORMAT_ENCODING"
    for owner, name in ((torch.Size, "mro"), (_MEM_FORMAT_ENCODING, 5)):
        data = pickle.dumps(_ByName(owner, name))
        with pytest.raises(ValueError, match=r"^m is refused: .*nothing that it names was run"):
            _Unpickler(data, "m").load()


@pytest.mark.parametrize("ranks", [1, 2])
def test_metadata(run_ranks, tmp_path, ranks):
    run_ranks(1, _save, tmp_path / "c")
    _replace(tmp_path / "c", "tensors/.metadata", pickle.dumps(_Evil(tmp_path / "ran")))
    messages = run_ranks(ranks, _refused, tmp_path / "c")
    for message in messages:
        assert message.startswith(
            f"{tmp_path}/c/tensors/.metadata is refused: it names posix.mkdir"
        )
    assert not (tmp_path / "ran").exists()


def test_a_tensor(run_ranks, tmp_path):
    run_ranks(1, _save, tmp_path / "c")
    entry = io.BytesIO()
    torch.save(_Evil(tmp_path / "ran"), entry)
    file = _replace_entry(tmp_path / "c", "model.marker", entry.getvalue())
    (message,) = run_ranks(1, _refused, tmp_path / "c")
    assert message.startswith(
        f"{file} is refused for its entry 'model.marker': it names posix.mkdir"
    )
    assert not (tmp_path / "ran").exists()


ENTRIES = {
    "another dtype": (torch.arange(7), "is of dtype torch.int64 and shape (7,)"),
    "another shape": (torch.zeros(8), "is of dtype torch.float32 and shape (8,)"),
    "no tensor": ([1.0] * 7, "it is a list in place of a tensor"),
}


def _mismatch(rank, world_size, device, folder, expected):
    model = make_tables(world_size, device, "row_wise")
    model.module.register_buffer("marker", torch.zeros(7))
    before = model_contents(model, "adam")
    with pytest.raises(ValueError, match=r"is refused for its entry 'model.marker'") as refusal:
        checkpoint.load(folder, model)
    assert expected in str(refusal.value)
    assert before == model_contents(model, "adam")


@pytest.mark.parametrize("what", ENTRIES)
def test_a_tensor_that_is_another_than_its_metadata_says(run_ranks, tmp_path, what):
    value, expected = ENTRIES[what]
    run_ranks(1, _save, tmp_path / "c")
    entry = io.BytesIO()
    torch.save(value, entry)
    _replace_entry(tmp_path / "c", "model.marker", entry.getvalue())
    run_ranks(1, _mismatch, tmp_path / "c", expected)


class _WithState(torch.nn.Module):
    """Has a state that is not a tensor."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def _values(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    model.module.add_module("extra", _WithState({"n": 3, "names": ["a", "b"]}))
    checkpoint.save(folder / "c", model)
    model.module.extra.state = {"n": 0, "names": []}
    checkpoint.load(folder / "c", model)
    assert model.module.extra.state == {"n": 3, "names": ["a", "b"]}

    model.module.extra.state = {"when": datetime.timedelta(1)}
    with pytest.raises(ValueError, match=r"names datetime.timedelta; nothing that"):
        checkpoint.save(folder / "d", model)
    assert not (folder / "d").exists()

    entry = io.BytesIO()
    torch.save(_Evil(folder / "ran"), entry)
    file = _replace_entry(folder / "c", "model.extra._extra_state.n", entry.getvalue())
    model.module.extra.state = {"n": 5, "names": []}
    before = model_contents(model, "adam")
    with pytest.raises(ValueError, match=r"it names posix.mkdir; nothing") as refusal:
        checkpoint.load(folder / "c", model)
    assert str(refusal.value).startswith(f"{file} is refused for its entry 'model.extra._extra")
    assert model.module.extra.state == {"n": 5, "names": []}
    assert model_contents(model, "adam") == before
    assert not (folder / "ran").exists()


def test_values_that_are_no_tensors(run_ranks, tmp_path):
    run_ranks(1, _values, tmp_path)
