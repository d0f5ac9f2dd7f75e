"""A load refuses a model with a damaged, short or missing file."""

from __future__ import annotations

import pytest

from torchrec_hkv import serving


def test_damaged(served):
    folder, _ = served

    def refused(name: str, message: str, change=None, verify: bool = False) -> None:
        path = folder / name
        whole = path.read_bytes()
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(whole))
        with pytest.raises(ValueError, match=message):
            serving.load(folder, verify=verify)
        path.write_bytes(whole)

    def flip(data: bytes) -> bytes:
        at = len(data) - 5
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    refused("serving.json", "serving.json can't be read")
    refused("serving.json", "is damaged", lambda data: data.replace(b"user", b"uses"))
    refused("program.pt2", "program.pt2 is damaged", flip)
    refused("cores-0000.bin", "cores-0000.bin is damaged", flip)
    refused("rows-0001.table", "rows-0001.table can't be read")
    refused("rows-0001.table", "bytes, but its table takes", lambda data: data[:-1])
    refused("rows-0001.table", "checksum of its rows is", flip, verify=True)
    serving.load(folder, verify=True)
