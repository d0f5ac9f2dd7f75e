"""Merges the rows of two replicas on CPUs: each sends its rows to the other.

This sends as many bytes as an all-reduce of two ranks, which exchanges halves and then the merged
halves. Unlike there, rows, last steps and scores are in one message, the next message arrives while
one is merged, and each row is written once, directly to the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table.replicas.sync_part import SyncPart, rounds
from torchrec_hkv.hash_table.replicas.table_sync import TableSync
from torchrec_hkv.hash_table.replicas.wire import Wire

#: Number of messages that are sent before the first is expected. Gloo writes a message to its
#: socket when the other replica expects it. If the message was sent before, Gloo's thread writes
#: it. Otherwise the sending thread does, while Gloo's thread polls.
_SENT_AHEAD = 1
#: Number of messages that are expected while one is merged.
_EXPECTED_AHEAD = 1
#: Number of messages that are in memory at once: this replica's, and the other replica's.
_IN_MEMORY = (_SENT_AHEAD + 1 + _EXPECTED_AHEAD) + (_EXPECTED_AHEAD + 1)
#: Bytes of a message. Gloo's thread polls while a call sends or expects a message, so a few large
#: messages take less CPU time.
_MESSAGE_BYTES = 6 << 20


class _Buffers:
    """A pool of memory for messages."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """An int64 tensor of this size."""
        for place, buffer in enumerate(self._free):
            if buffer.numel() >= size:
                return self._free.pop(place)[:size]
        return torch.empty(size, dtype=torch.int64)

    def put(self, buffer: Tensor) -> None:
        self._free.append(buffer)


class _Message:
    """Parts that are exchanged together: a message to the other replica, and one from it.

    Args:
        parts: the parts.
        wire: connection to the other replica.
        number: number of the message.
        buffers: memory for messages.
    """

    def __init__(
        self, parts: Sequence[SyncPart], wire: Wire, number: int, buffers: _Buffers
    ) -> None:
        self._wire, self._number, self._buffers = wire, number, buffers
        # Each part with its offset in the message.
        self._parts: list[tuple[SyncPart, int]] = []
        self._size = 0
        for part in parts:
            self._parts.append((part, self._size))
            self._size += part.words

    def send(self) -> None:
        """Begins to send this replica's message."""
        self._sent = self._buffers.take(self._size)
        for part, begin in self._parts:
            part.pack(self._sent, begin)
        self._departure = self._wire.send(self._sent, self._number)

    def expect(self) -> None:
        """Begins to receive the other replica's message."""
        self._received = self._buffers.take(self._size)
        self._arrival = self._wire.receive(self._received, self._number)

    def merge(self) -> None:
        """Waits for both messages and merges them."""
        self._arrival.wait()
        self._departure.wait()  # merging overwrites the records
        for part, begin in self._parts:
            part.merge(self._sent, self._received, begin)
        self._buffers.put(self._sent)
        self._buffers.put(self._received)


def swap_rows(tables: Sequence[TableSync], wire: Wire, max_bytes: int) -> None:
    """Merges all ids of all tables.

    Args:
        tables: the tables' syncs, with the same ids in both replicas.
        wire: connection to the other replica.
        max_bytes: maximal bytes of rows in flight, for each of the two replicas.
    """
    maximum = min(_MESSAGE_BYTES, 2 * max_bytes // _IN_MEMORY)
    buffers = _Buffers()
    sent: deque[_Message] = deque()
    expected: deque[_Message] = deque()

    def expect() -> None:
        expected.append(sent.popleft())
        expected[-1].expect()

    for number, parts in enumerate(rounds(tables, maximum), start=1):
        sent.append(_Message(parts, wire, number, buffers))
        sent[-1].send()
        if len(sent) > _SENT_AHEAD:
            expect()
        if len(expected) > _EXPECTED_AHEAD:
            expected.popleft().merge()
    while sent:
        expect()
    while expected:
        expected.popleft().merge()
