"""A text log that has only a header is refused."""

from __future__ import annotations

import pytest

from torchrec_hkv.replay.log import LogError
from torchrec_hkv.replay.text import TextLog


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("block", [1, 11, 1 << 20])
@pytest.mark.parametrize(("text", "header"), [("user,item", None), ("user", True)])
def test_is_refused(tmp_path, text, header, block, end):
    path = tmp_path / "log.csv"
    path.write_text(text + end)
    with pytest.raises(LogError, match=f"log.csv has a header, '{text}', and no line after it"):
        TextLog(path, header=header, block=block)


@pytest.mark.parametrize(
    ("text", "header", "lines"),
    [
        ("abc\n", None, 1),
        ("user,item\n", False, 1),
        ("user,item\n3,4\n", None, 1),
        ("7\n", None, 1),
    ],
)
@pytest.mark.parametrize("block", [1, 10, 1 << 20])
def test_lines_are_read(tmp_path, text, header, lines, block):
    path = tmp_path / "log.csv"
    path.write_text(text)
    log = TextLog(path, header=header, block=block)
    for _ in range(2):
        assert sum(part.num_samples for part in log.parts(log.columns)) == lines
