"""Reads the metadata of :mod:`torch.distributed.checkpoint` without running code that it names.

Metadata is a pickle, and unpickling calls whatever a pickle names. This module accepts only the
names that metadata of torch.distributed.checkpoint has, calls none of them while reading, and
builds the result from values that passed all checks.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_hkv.checkpoint.record import METADATA, TENSORS, FileRecord
from torchrec_hkv.json_schema import Integer, JsonPlace, Text

#: Name of the metadata file in a folder of :mod:`torch.distributed.checkpoint`.
DCP_METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_COUNT = Integer(0, 1 << 62)
_KEY = Text()


@dataclasses.dataclass
class _Named:
    """Stands for an object of a pickle. Stores its arguments and state and runs nothing."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    # Some are keys in the metadata.
    __hash__ = object.__hash__


def _named(*names: str) -> dict[str, type[_Named]]:
    return {name: type(name, (_Named,), {"__hash__": object.__hash__}) for name in names}


#: Classes of ``torch.distributed.checkpoint.metadata``.
_METADATA = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
    "MetadataIndex",
    "StorageMeta",
)
_PATHS = ("PosixPath", "WindowsPath")
_OBJECTS = _named(*_METADATA, "_StorageInfo", "Size", "_get_layout", *_PATHS)
#: Stand-ins by module and name, as torch 2.11 to 2.14 and Python 3.10 to 3.14 write them.
_KNOWN: dict[tuple[str, str], object] = {
    ("torch", "Size"): _OBJECTS["Size"],
    ("torch.serialization", "_get_layout"): _OBJECTS["_get_layout"],
    (f"{_DCP}.filesystem", "_StorageInfo"): _OBJECTS["_StorageInfo"],
    **{(f"{_DCP}.metadata", name): _OBJECTS[name] for name in _METADATA},
    **{
        (module, name): _OBJECTS[name]
        for module in ("pathlib", "pathlib._local")
        for name in _PATHS
    },
    **{("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype},
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the names that metadata has."""

    def __init__(self, data: bytes, file: str) -> None:
        super().__init__(io.BytesIO(data))
        self._file_name = file

    def _member(self, found: object, name: object) -> object:
        """Replaces ``getattr``, by which Python 3.11.0 to 3.11.3 pickle enumerations."""
        stand_in: Any = _OBJECTS["_MEM_FORMAT_ENCODING"]
        if found is not stand_in or not isinstance(name, str):
            raise ValueError(
                f"{self._file_name} is refused: it asks for {name!r} of {found!r}, which metadata "
                f"of {_DCP} does not; nothing that it names was run."
            )
        return stand_in(name)

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return self._member
        found = _KNOWN.get((module, name))
        if found is None:
            raise ValueError(
                f"{self._file_name} is refused: it names {module}.{name}, which metadata of {_DCP} "
                "does not have; nothing that it names was run."
            )
        return found


def read_metadata(folder: Path, files: Mapping[str, FileRecord]) -> Metadata:
    """Reads the metadata of a checkpoint's tensors.

    Args:
        folder: the folder of the checkpoint.
        files: the files in the checkpoint's record, by their paths in the checkpoint.

    Raises:
        ValueError: the metadata is damaged, names classes that metadata does not have, or
            contradicts itself or the record. The message names the file.
    """
    sizes = {
        name.removeprefix(f"{TENSORS}/"): file.bytes
        for name, file in files.items()
        if name != METADATA
    }
    return _read(folder / METADATA, _Files(sizes, "that the checkpoint's record names"))


def read_dcp_metadata(folder: Path) -> Metadata:
    """Reads the metadata of a folder that :mod:`torch.distributed.checkpoint` wrote.

    Raises:
        ValueError: as :func:`read_metadata`, but an entry may be in any file of the folder.
    """
    sizes = {
        path.name: path.stat().st_size
        for path in folder.iterdir()
        if path.is_file() and path.name != DCP_METADATA
    }
    return _read(folder / DCP_METADATA, _Files(sizes, "of the folder"))


@dataclasses.dataclass(frozen=True)
class _Files:
    """Sizes of the files that entries may be in, by name, and their description in messages."""

    sizes: Mapping[str, int]
    described: str


def _read(path: Path, files: _Files) -> Metadata:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    unpickler = _Unpickler(data, str(path))
    try:
        content = unpickler.load()
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        ImportError,
        IndexError,
        KeyError,
        MemoryError,
        OverflowError,
        RecursionError,
        TypeError,
    ) as error:
        raise ValueError(f"{path} is damaged: it is not a pickle of metadata ({error}).") from None
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} is damaged: it is not a pickle of metadata ({error}).") from None
    return _metadata(content, JsonPlace(str(path)), files)


def _metadata(content: object, place: JsonPlace, files: _Files) -> Metadata:
    state = _state(content, "Metadata", place)
    entries = _mapping(state, "state_dict_metadata", place)
    tensors = {
        _KEY.read(key, JsonPlace(place.file, "a key of state_dict_metadata")): _entry(
            value, place.of("state_dict_metadata").of(str(key))
        )
        for key, value in entries.items()
    }
    stored: dict[MetadataIndex, _StorageInfo] = {}
    at = place.of("storage_data")
    for key, value in _mapping(state, "storage_data", place).items():
        index = _index(key, at)
        if index in stored:
            raise at.refuse(_shown(index), "named once")
        stored[index] = _storage(value, at.of(_shown(index)), files)
    _check_disjoint(stored, at)
    for key, entry in tensors.items():
        offsets: Sequence[torch.Size | None] = [None]
        if isinstance(entry, TensorStorageMetadata):
            offsets = [chunk.offsets for chunk in entry.chunks]
        for offset in offsets:
            if MetadataIndex(key, offset) not in stored:
                shown = _shown(MetadataIndex(key, offset))
                raise at.of(shown).missing("the place of that part in a file")
    return Metadata(state_dict_metadata=tensors, storage_data=stored)


def _state(value: object, name: str, place: JsonPlace) -> dict[Any, Any]:
    """The attributes of an object, which must be of the class with the given name."""
    if type(value) is not _OBJECTS[name]:
        raise place.refuse(_what(value), f"a {name}")
    if value.state is None:  # has no attributes
        return {}
    if type(value.state) is not dict:
        raise place.refuse(_what(value.state), f"the attributes of a {name}")
    return value.state


def _mapping(state: Mapping[Any, Any], name: str, place: JsonPlace) -> dict[Any, Any]:
    value = state.get(name)
    if type(value) is not dict:
        raise place.of(name).refuse(_what(value), "a dict")
    return value


def _entry(value: object, place: JsonPlace) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(value) is _OBJECTS["BytesStorageMetadata"]:
        return BytesStorageMetadata()
    state = _state(value, "TensorStorageMetadata", place)
    size = _size(state.get("size"), place.of("size"))
    properties = state.get("properties")
    parts = getattr(properties, "state", None)
    if type(properties) is not _OBJECTS["TensorProperties"] or type(parts) is not tuple:
        raise place.of("properties").refuse(_what(properties), "a TensorProperties")
    if len(parts) != 5 or type(parts[0]) is not torch.dtype:
        raise place.of("properties").refuse(_what(parts), "a dtype and four more")
    chunks = state.get("chunks")
    if type(chunks) is not list:
        raise place.of("chunks").refuse(_what(chunks), "a list")
    parsed = [_chunk(chunk, place.of("chunks").at(i)) for i, chunk in enumerate(chunks)]
    _check_tiles(size, parsed, place.of("chunks"))
    return TensorStorageMetadata(TensorProperties(dtype=parts[0]), size, parsed)


def _chunk(value: object, place: JsonPlace) -> ChunkStorageMetadata:
    state = _state(value, "ChunkStorageMetadata", place)
    return ChunkStorageMetadata(
        offsets=_size(state.get("offsets"), place.of("offsets")),
        sizes=_size(state.get("sizes"), place.of("sizes")),
    )


def _size(value: object, place: JsonPlace) -> torch.Size:
    given = getattr(value, "arguments", None)
    is_size = type(value) is _OBJECTS["Size"] and len(given) == 1 and type(given[0]) is tuple
    if not is_size or value.state is not None:
        raise place.refuse(_what(value), "a torch.Size")
    return torch.Size([_COUNT.read(n, place.at(i)) for i, n in enumerate(given[0])])


def _check_tiles(
    size: torch.Size, chunks: Sequence[ChunkStorageMetadata], place: JsonPlace
) -> None:
    """Checks that chunks cover a tensor and don't overlap."""
    filled = 0
    for i, chunk in enumerate(chunks):
        ends = zip(chunk.offsets, chunk.sizes, size, strict=False)
        are_complete = len(chunk.offsets) == len(chunk.sizes) == len(size)
        if not are_complete or any(offset + length > end for offset, length, end in ends):
            raise place.at(i).refuse(
                [tuple(chunk.offsets), tuple(chunk.sizes)], f"a part of {tuple(size)}"
            )
        filled += chunk.sizes.numel()
    if filled != size.numel():
        raise place.refuse(
            f"{len(chunks)} parts of {filled} values", f"all {size.numel()} values of {tuple(size)}"
        )
    parts = [chunk for chunk in chunks if chunk.sizes.numel()]
    if len(parts) < 2:
        return
    begins = torch.tensor([tuple(chunk.offsets) for chunk in parts])
    ends = begins + torch.tensor([tuple(chunk.sizes) for chunk in parts])
    for i in range(len(parts) - 1):
        meets = torch.maximum(begins[i], begins[i + 1 :]) < torch.minimum(ends[i], ends[i + 1 :])
        if meets.all(1).any():
            other = i + 1 + int(meets.all(1).nonzero()[0])
            raise place.at(other).refuse(
                [tuple(parts[other].offsets), tuple(parts[other].sizes)], "apart from the others"
            )


def _index(value: object, place: JsonPlace) -> MetadataIndex:
    state = _state(value, "MetadataIndex", JsonPlace(place.file, f"a key of {place.key}"))
    key = _KEY.read(state.get("fqn"), JsonPlace(place.file, f"a name in {place.key}"))
    offset = state.get("offset")
    if offset is not None:
        offset = _size(offset, JsonPlace(place.file, f"an offset in {place.key}"))
    return MetadataIndex(key, offset)


def _storage(value: object, place: JsonPlace, files: _Files) -> _StorageInfo:
    state = _state(value, "_StorageInfo", place)
    name = state.get("relative_path")
    size = files.sizes.get(name) if type(name) is str else None
    if size is None:
        raise place.of("relative_path").refuse(name, f"a file of tensors {files.described}")
    offset = _COUNT.read(state.get("offset"), place.of("offset"))
    length = _COUNT.read(state.get("length"), place.of("length"))
    if offset + length > size:
        raise place.of("length").refuse(
            length, f"at most the {size} bytes of {name} less the offset {offset}"
        )
    if state.get("transform_descriptors"):
        raise place.of("transform_descriptors").refuse(
            _what(state["transform_descriptors"]), "empty, as torchrec_hkv.checkpoint.save has it"
        )
    return _StorageInfo(name, offset, length)


def _check_disjoint(stored: Mapping[MetadataIndex, _StorageInfo], place: JsonPlace) -> None:
    """Checks that no two entries overlap in a file."""
    order = sorted(stored, key=lambda index: (stored[index].relative_path, stored[index].offset))
    end, file = 0, None
    for index in order:
        info = stored[index]
        if info.relative_path != file:
            end, file = 0, info.relative_path
        if info.length and info.offset < end:
            raise (
                place.of(_shown(index))
                .of("offset")
                .refuse(info.offset, f"at least {end} in {file}, where the entry before it ends")
            )
        end = max(end, info.offset + info.length)


def _shown(index: MetadataIndex) -> str:
    return index.fqn if index.offset is None else f"{index.fqn} at {tuple(index.offset)}"


def _what(value: object) -> object:
    """A value as messages show it."""
    if isinstance(value, _Named):
        return type(value).__name__
    shown = isinstance(value, (str, int, float, tuple, list, dict))
    return value if shown else type(value).__name__
