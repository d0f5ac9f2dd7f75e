"""A load of a checkpoint with one changed value and correct checksums is refused by name and
changes nothing, or gives what was saved."""

from __future__ import annotations

import copy
import json
import pickle
import random
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.checkpoint_models import make_tables, model_contents, train
from tests.support.mutations import GONE, checksum, mutated, mutations, refusal, write
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import MinFrequency

ADMISSION = MinFrequency(2, entries=256)
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
)


def _save(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    train(model, rank, device, range(4))
    checkpoint.save(folder, model, model.fused_optimizer)


class _Loads:
    """Loads a checkpoint repeatedly."""

    def __init__(self, rank, world_size, device, folder):
        self.folder = folder
        self.model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
        checkpoint.load(folder, self.model, self.model.fused_optimizer)
        self.saved = self._content()
        train(self.model, rank, device, range(90, 92))
        self.before = self._content()
        assert self.before != self.saved

    def _content(self):
        state = self.model.state_dict()
        tensors = {
            key: [shard.tensor.tolist() for shard in value.local_shards()]
            for key, value in state.items()
            if "stock" in key or ".tt" in key
        }
        # Changed steps, clocks and epochs may be valid, so they are not compared.
        entries = [value for value in model_contents(self.model, "adam") if value[1] != "all"]
        return entries, tensors

    def check(self):
        """The load fails and changes nothing, or gives what was saved."""
        message = refusal(
            lambda: checkpoint.load(self.folder, self.model, self.model.fused_optimizer)
        )
        if message is None:
            assert self._content() == self.saved
            self.before = self.saved
            return
        assert str(self.folder) in message
        assert self._content() == self.before


def _change_record(rank, world_size, device, folder):
    loads = _Loads(rank, world_size, device, folder)
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())

    @SETTINGS
    @given(data=st.data())
    def change(data):
        write(path, mutated(content, *data.draw(mutations(content))))
        loads.check()

    change()


@pytest.mark.slow
def test_the_record(run_ranks, tmp_path):
    run_ranks(2, _save, tmp_path / "c")
    run_ranks(1, _change_record, tmp_path / "c", timeout=600.0)


def _change_manifest(rank, world_size, device, folder):
    loads = _Loads(rank, world_size, device, folder)
    path = folder / "checkpoint.json"
    record = json.loads(path.read_text())
    shard = record["tables"]["ebc.embedding_bags.lru"]["shards"][1]
    manifest = folder / shard["folder"] / "manifest.json"
    content = json.loads(manifest.read_text())

    @SETTINGS
    @given(data=st.data())
    def change(data):
        changed = mutated(content, *data.draw(mutations(content)))
        write(manifest, changed)
        if isinstance(changed, dict):  # and the record's own
            rest = {key: value for key, value in changed.items() if key != "crc32"}
            shard["crc32"] = checksum(rest)
            write(path, record)
        loads.check()

    change()


@pytest.mark.slow
def test_a_manifest(run_ranks, tmp_path):
    run_ranks(2, _save, tmp_path / "c")
    run_ranks(1, _change_manifest, tmp_path / "c", timeout=600.0)


CASES = [
    (("world_size",), 0, "world_size is 0, but must be an integer from 1 to 2^31 - 1"),
    (("has_optimizer",), 1, "has_optimizer is 1, but must be true or false"),
    (("save",), None, "save is None, but must be 8 to 32 hexadecimal digits"),
    (("tables",), [], "tables is [], but must be an object"),
    (("files", "tensors/../x"), {}, "a key of files is 'tensors/../x', but must be 'tensors/'"),
    (("files", "/etc/passwd"), {}, "a key of files is '/etc/passwd', but must be 'tensors/'"),
    (("files", "tensors/.."), {}, "a key of files is 'tensors/..', but must be 'tensors/'"),
    (("files", "tensors/.metadata"), GONE, "['tensors/.metadata'] is missing, but must be"),
    (("files", "tensors/.metadata", "bytes"), -1, "bytes is -1, but must be an integer from 0"),
    (("shards",), [], "shards is [], but must be shards of all owners, 0 to 65536"),
    (("shards", 0, "folder"), "../x", "folder is '../x', but must be 'tables/ebc.embedding_b"),
    (("shards", 0, "folder"), "/tmp", "folder is '/tmp', but must be 'tables/ebc.embedding_b"),
    (("shards", 0, "owners"), [0, 1 << 20], "owners[1] is 1048576, but must be an integer from 0"),
    (("shards", 0, "owners"), [5, 5], "owners is [5, 5], but must be two numbers that ascend"),
    (("shards", 1, "owners"), [0, 65536], "must be apart from those of shard 0, [0, 32768]"),
    (("shards", 0, "columns"), [0], "columns is [0], but must be a list of 2 times an integer"),
    (("shards", 0, "entries"), -3, "entries is -3, but must be an integer from 0 to 2^38"),
    (("shards", 0, "crc32"), GONE, "crc32 is missing, but must be an integer from 0 to 2^32 - 1"),
    (("shards", 0, "other"), 1, "is 'other', but must be one of folder, owners, columns"),
    (("rates", "lr"), "fast", "lr is 'fast', but must be a finite number, null, or a list"),
    (("rates", "lr"), [], "lr is [], but must be a number, as the optimizer has"),
    (("rates", "lr"), None, "lr is None, but must be a number, as the optimizer has"),
]


def _named(rank, world_size, device, folder):
    loads = _Loads(rank, world_size, device, folder)
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())
    parameter = next(name for name in content["learning_rates"] if "lru" in name)
    short = {
        "shards": ("tables", "ebc.embedding_bags.lru", "shards"),
        "rates": ("learning_rates", parameter),
    }
    for where, value, expected in CASES:
        key = (*short.get(where[0], where[:1]), *where[1:])
        write(path, mutated(content, key, value))
        message = refusal(lambda: checkpoint.load(folder, loads.model, loads.model.fused_optimizer))
        assert message is not None, where
        assert message.startswith(f"{path}: "), message
        assert expected in message, message
        loads.check()


@pytest.mark.slow
def test_the_error_names_file_key_value_and_what_is_allowed(run_ranks, tmp_path):
    run_ranks(2, _save, tmp_path / "c")
    run_ranks(1, _named, tmp_path / "c")


def _values_of(metadata):
    """All values of the metadata, as (owner, attribute name)."""
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            yield from ((entry, name) for name in ("size", "chunks", "properties"))
            for chunk in entry.chunks:
                yield from ((chunk, name) for name in ("offsets", "sizes"))
    for info in metadata.storage_data.values():
        yield from ((info, name) for name in ("relative_path", "offset", "length"))
        yield info, "transform_descriptors"
    yield from ((metadata, name) for name in ("state_dict_metadata", "storage_data"))


VALUES = [
    None,
    -1,
    0,
    3,
    1 << 60,
    1 << 70,
    True,
    1.5,
    "",
    "../x",
    "/etc/passwd",
    ".metadata",
    [],
    {},
    [None],
    {"a": 3},
    torch.Size([3]),
    torch.Size([1 << 40, 1 << 40]),
    torch.float64,
]


def _change_metadata(rank, world_size, device, folder):
    loads = _Loads(rank, world_size, device, folder)
    path, name = folder / "checkpoint.json", "tensors/.metadata"
    record = json.loads(path.read_text())
    good = pickle.loads((folder / name).read_bytes())
    choice = random.Random(3)
    refused = 0
    for _ in range(80):
        changed = copy.deepcopy(good)
        owner, attribute = choice.choice(list(_values_of(changed)))
        object.__setattr__(owner, attribute, choice.choice(VALUES))
        data = pickle.dumps(changed)
        (folder / name).write_bytes(data)
        record["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
        write(path, record)
        before = loads.before
        loads.check()
        refused += loads.before is before
    assert refused > 50


@pytest.mark.slow
def test_metadata(run_ranks, tmp_path):
    run_ranks(2, _save, tmp_path / "c")
    run_ranks(1, _change_metadata, tmp_path / "c", timeout=600.0)


@pytest.mark.parametrize("data", [b"", b"\x80", b"not a pickle", b"\x80\x04N.", b"I1\n."])
def test_no_metadata(run_ranks, tmp_path, data):
    run_ranks(1, _save, tmp_path / "c")
    (tmp_path / "c" / "tensors" / ".metadata").write_bytes(data)
    path = tmp_path / "c" / "checkpoint.json"
    record = json.loads(path.read_text())
    record["files"]["tensors/.metadata"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    write(path, record)
    (message,) = run_ranks(1, _message, tmp_path / "c")
    assert message.startswith(str(tmp_path / "c" / "tensors" / ".metadata"))


def _message(rank, world_size, device, folder: Path):
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    return refusal(lambda: checkpoint.load(folder, model))
