"""JSON files with a format name, a version, and a checksum of their content."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, Literal

from torchrec_hkv.json_schema import parse_json


def write_signed(
    path: Path, form: str, version: int, content: dict[str, Any], mode: Literal["w", "x"] = "w"
) -> None:
    """Writes a file and flushes it to the disk.

    Args:
        path: path of the file.
        form: name of the format.
        version: version of the format.
        content: JSON values.
        mode: ``"x"`` raises if the file exists.
    """
    content = {"format": form, "version": version, **content}
    with open(path, mode, encoding="utf-8") as file:
        json.dump({**content, "crc32": _checksum(content)}, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_signed(path: Path, form: str, version: int, what: str) -> dict[str, Any]:
    """Reads the content of a file of :func:`write_signed`.

    Args:
        path: path of the file.
        form: name of the format.
        version: version of the format.
        what: what the file belongs to, for messages.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is damaged, or of another format or version.
    """
    content = parse_json(path, path.read_bytes())
    if not isinstance(content, dict) or content.get("format") != form:
        raise ValueError(f"{path} is damaged, or not a file of {what}: its format is not {form!r}.")
    found = content.get("version")
    if type(found) is not int or found != version:
        raise ValueError(
            f"{path} has version {found!r}, but this program reads version {version}: load it "
            "with the torchrec_hkv that saved it."
        )
    named = content.pop("crc32", None)
    if type(named) is not int or named != _checksum(content):
        raise ValueError(
            f"{path} is damaged: its checksum is {_checksum(content)}, but it has {named!r}."
        )
    return {key: value for key, value in content.items() if key not in ("format", "version")}


def checksum(form: str, version: int, content: dict[str, Any]) -> int:
    """The checksum that :func:`write_signed` writes for this content."""
    return _checksum({"format": form, "version": version, **content})


def _checksum(content: dict[str, Any]) -> int:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(canonical.encode())
