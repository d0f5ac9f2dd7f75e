"""JSON files with one changed value and valid checksums."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

#: Values that are close to values of a file, and values that differ from all of them.
VALUES = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            1 << 31,
            1 << 32,
            1 << 37,
            1 << 60,
            1 << 63,
            1 << 64,
            -(1 << 63),
            10**400,
            0.0,
            1.5,
            -0.0,
            1e308,
            float("nan"),
            float("inf"),
            "",
            "..",
            "../x",
            "/etc/passwd",
            "a\0b",
            "\ud800",
            [],
            {},
            [[]],
            [0, 0],
            [65536, 0],
            {"": 0},
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)
#: Marks a removed key or item.
GONE = object()


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values of a file except its checksum, outermost first."""
    if path != ("crc32",):
        yield path
    items = content.items() if isinstance(content, dict) else ()
    for key, value in enumerate(content) if isinstance(content, list) else items:
        yield from places(value, (*path, key))


def mutated(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy with one replaced value."""
    if not path:
        return value
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


def sign(content: Any) -> Any:
    """Returns the content with its checksum, by the documented formula."""
    if not isinstance(content, dict):
        return content
    rest = {key: value for key, value in content.items() if key != "crc32"}
    return {**rest, "crc32": checksum(rest)}


def checksum(rest: dict[str, Any]) -> int:
    """Returns the CRC-32 of a manifest without its entry ``"crc32"``."""
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


def write(path: Path, content: Any) -> None:
    """Writes a file with the checksum of its content."""
    path.write_text(json.dumps(sign(content)))


@st.composite
def mutations(draw: st.DrawFn, content: Any) -> tuple[tuple[Any, ...], Any]:
    """Draws a path, and its new value: any JSON, another value of the file, or nothing."""
    path = draw(st.sampled_from(list(places(content))))
    value = draw(
        VALUES | st.sampled_from(list(leaves(content))) | (st.just(GONE) if path else st.nothing())
    )
    return path, value


def refusal(load: Callable[[], Any]) -> str | None:
    """Returns the message of the ValueError that a load raises, or None."""
    try:
        load()
    except ValueError as error:
        return str(error)
    return None


def leaves(content: Any) -> Iterator[Any]:
    """Yields all values that are not containers."""
    if isinstance(content, (dict, list)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from leaves(value)
    else:
        yield content
