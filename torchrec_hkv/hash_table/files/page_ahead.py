"""Gets the pages of a table before it is loaded.

The system clears each page at its first use, which takes longer than to fill it. While files are
read, processors are idle: they can clear pages meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torchrec_hkv import _C
from torchrec_hkv.hash_table.files.file_table import FileTable
from torchrec_hkv.hash_table.files.shard_files import entry_bytes

#: Bytes of slots whose pages are got at a time.
_PIECE_BYTES = 16 << 20
#: Tables with fewer bytes are filled as they are: a thread takes longer to begin.
_LEAST_BYTES = 8 * _PIECE_BYTES
#: Slots for each entry, at most, so that entries use all pages.
_MOST_SLOTS = 8


@contextlib.contextmanager
def pages_ahead(table: FileTable, entries: int) -> Iterator[None]:
    """Gets pages of a table in the order of its slots, in a thread, until the block ends.

    Args:
        table: on a CPU. It must not grow meanwhile.
        entries: how many are put into it.
    """
    slot_bytes = entry_bytes(table.fields)
    if table.slots * slot_bytes < _LEAST_BYTES or entries * _MOST_SLOTS < table.slots:
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
