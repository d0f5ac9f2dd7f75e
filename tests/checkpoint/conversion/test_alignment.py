"""Values of exported files are aligned, and files with values at any byte are converted."""

from __future__ import annotations

import json

import safetensors.torch
import torch

from tests.support.conversions import converted, entries_of
from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert

NAME = "ebc.embedding_bags.user"
N = 33  # odd, so that rows of 16 bits end between two words


def _columns():
    return {
        "id": torch.randperm(N) - 5,
        "row": torch.randn(N, 3).bfloat16(),
        "state": torch.rand(N, 1),
        "score": torch.randint(1, 2**40, (N,)),
        "last_step": torch.randint(1, 100, (N,)).int(),
    }


def _check(saved, columns):
    found, order = entries_of(saved, "user"), columns["id"].argsort()
    assert found["ids"].equal(columns["id"][order])
    assert found["rows"].equal(columns["row"][order])
    assert found["scores"].equal(columns["score"][order])
    assert found["last_steps"].equal(columns["last_step"][order])


def test_exported_files_are_aligned(tmp_path):
    columns, first = _columns(), tmp_path / "user.safetensors"
    safetensors.torch.save_file(columns, first)
    converted(first, tmp_path / "hkv", tables=[NAME])
    back = tmp_path / "back.safetensors"
    convert(tmp_path / "hkv", back, ConversionOptions())
    text = back.read_bytes()
    length = int.from_bytes(text[:8], "little")
    for name, tensor in json.loads(text[8 : 8 + length]).items():
        if name != "__metadata__":
            size = int(tensor["dtype"].strip("BFIU")) // 8
            assert (8 + length + tensor["data_offsets"][0]) % size == 0, name
    _check(converted(back, tmp_path / "again", tables=[NAME]), columns)


def test_values_may_begin_anywhere(tmp_path):
    columns, path = _columns(), tmp_path / "user.safetensors"
    kinds = {"id": "I64", "row": "BF16", "state": "F32", "score": "I64", "last_step": "I32"}
    header, data = {}, b"\0"
    for name, tensor in columns.items():
        part = tensor.view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": kinds[name],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    _check(converted(path, tmp_path / "hkv", tables=[NAME]), columns)
