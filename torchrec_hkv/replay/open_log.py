"""Opens logs by the names of their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrec_hkv.replay.log import JoinedLog, Log, LogError, SortedLog, WithoutMissing

FORMATS = ("npy", "npz", "parquet", "text", "criteo", "int64")
_SUFFIXES = {".npy": "npy", ".npz": "npz", ".parquet": "parquet", ".pq": "parquet"}
_STREAMED = ("text", "criteo", "int64")


def open_log(
    paths: Sequence[str],
    format: str | None = None,
    *,
    separator: str | None = None,
    header: bool | None = None,
    sort_by: str | None = None,
    missing: int | None = None,
) -> Log:
    """Opens a log of one file, or of several in sequence.

    Args:
        paths: paths of files, of folders of Parquet files (in the order of their names), or ``-``
            for the standard input.
        format: one of :data:`FORMATS`. None: by the suffix of the name; other files are text, or
            Criteo's if the first line looks like it.
        separator: separator in text; see :class:`torchrec_hkv.replay.TextLog`.
        header: whether text has a header; see :class:`torchrec_hkv.replay.TextLog`.
        sort_by: a column with times, if the log is not in order of time.
        missing: the value that marks a missing id.

    Raises:
        LogError: a log can't be read, or needs a package that is missing.
    """
    if not paths:
        raise LogError("A log is missing: name a file, or - for the standard input.")
    files: list[str] = []
    for path in paths:
        if path != "-" and Path(path).is_dir():
            found = sorted(str(file) for file in Path(path).rglob("*.parquet"))
            if not found:
                raise LogError(f"Folder {path} has no Parquet file (*.parquet).")
            files += found
        else:
            files.append(path)
    if files.count("-") and len(files) > 1:
        raise LogError("The standard input (-) can't be joined with other logs.")
    log: Log = JoinedLog([_open(path, format, separator, header) for path in files])
    if sort_by is not None:
        log = SortedLog(log, sort_by)
    return log if missing is None else WithoutMissing(log, missing)


def _open(path: str, format: str | None, separator: str | None, header: bool | None) -> Log:
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise LogError(
            f"Logs need the package numpy, which can't be imported ({error}): pip install numpy."
        ) from None
    from torchrec_hkv.replay.arrays import RawLog, read_npy, read_npz
    from torchrec_hkv.replay.parquet import ParquetLog
    from torchrec_hkv.replay.text import TextLog, looks_like_criteo

    file = None if path == "-" else Path(path)
    if format is None:
        format = "text" if file is None else _SUFFIXES.get(file.suffix, "text")
        if file is not None and format == "text" and separator is None and not header:
            format = "criteo" if file.is_file() and looks_like_criteo(file) else "text"
    if file is None and format not in _STREAMED:
        raise LogError(
            f"The standard input can't be of format {format!r}, but must be {', '.join(_STREAMED)}."
        )
    if format in ("text", "criteo"):
        return TextLog(file, separator, header, criteo=format == "criteo")
    if separator is not None or header is not None:
        raise LogError(f"Separators and headers are for text, but {path} is of format {format!r}.")
    if file is None or format == "int64":
        return RawLog("the standard input" if file is None else path, file)
    return {"npy": read_npy, "npz": read_npz, "parquet": ParquetLog}[format](file)
