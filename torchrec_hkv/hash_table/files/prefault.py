"""Maps the memory pages of a table before a load fills them.

The operating system clears each page at its first use, which takes longer than filling it. Cores
are idle while files are read, so they clear pages meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torchrec_hkv import _C
from torchrec_hkv.hash_table.files.file_table import FileTable
from torchrec_hkv.hash_table.files.shard_files import entry_bytes

#: Bytes of slots whose pages are mapped at a time.
_PIECE_BYTES = 16 << 20
#: For smaller tables, starting a thread takes longer than it saves.
_MIN_BYTES = 8 * _PIECE_BYTES
#: With more slots than this for each entry, entries would not use all pages.
_MAX_SLOTS = 8


@contextlib.contextmanager
def prefault_pages(table: FileTable, entries: int) -> Iterator[None]:
    """A context in which a thread maps the pages of a table in the order of its slots.

    Args:
        table: a table on a CPU. It must not grow in the context.
        entries: number of entries that are loaded.
    """
    slot_bytes = entry_bytes(table.fields)
    if table.slots * slot_bytes < _MIN_BYTES or entries * _MAX_SLOTS < table.slots:
        yield
        return
    ended = threading.Event()

    def work() -> None:
        piece = max(1, _PIECE_BYTES // slot_bytes)
        for first in range(0, table.slots, piece):
            if ended.is_set():
                return
            end = min(first + piece, table.slots)
            _C.populate_slots(table.group.handle, table.table, first, end)

    thread = threading.Thread(target=work, name="pages ahead")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
