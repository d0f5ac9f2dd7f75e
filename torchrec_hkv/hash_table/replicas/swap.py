"""Merges the rows of two replicas on CPUs: each sends its rows to the other.

This sends as many bytes as an all-reduce of two ranks, which exchanges halves and then the merged
halves. But rows, last steps and scores are in one message, the next message arrives while one is
merged, and each row is written once, directly to the table.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table.replicas.sync_part import SyncPart, rounds
from torchrec_hkv.hash_table.replicas.table_sync import TableSync
from torchrec_hkv.hash_table.replicas.wire import Wire

#: Messages in flight while one is merged.
AHEAD = 1
#: Their bytes: enough to be worth a call, and few enough to stay in a CPU's caches.
_MESSAGE_BYTES = 3 << 20


class _PartOfMessage:
    """Where a part's records and numbers are in a message of int64.

    Args:
        part: the ids.
        own: this replica's message.
        theirs: the other's, as large.
        begin: where the part begins.
    """

    def __init__(self, part: SyncPart, own: Tensor, theirs: Tensor, begin: int) -> None:
        self.part = part
        record = part.n * part.of.record_columns
        end = begin + (record + 1) // 2
        self.own, self.theirs = (
            message[begin:end].view(torch.float32)[:record].view(part.n, -1)
            for message in (own, theirs)
        )
        self._numbers = [
            message[end : end + part.n * part.of.numbers].view(part.of.numbers, part.n)
            for message in (own, theirs)
        ]
        own_numbers = self._numbers[0]
        part.pack(self.own, *own_numbers)

    def merge(self) -> None:
        numbers: list[Tensor] = []
        if self.part.of.numbers:
            own, theirs = self._numbers
            torch.maximum(own[0], theirs[0], out=own[0])
            own[1:] += theirs[1:]
            numbers = list(own)
        self.part.merge(self.own, self.theirs, *numbers)


class _Message:
    """Parts that travel together, both ways."""

    def __init__(self, parts: Sequence[SyncPart], wire: Wire, number: int) -> None:
        self._given, self._wire, self._number = parts, wire, number
        size = sum(part.words for part in parts)
        self._own = torch.empty(size, dtype=torch.int64)
        self._theirs = torch.empty_like(self._own)
        self._arrival = wire.receive(self._theirs, number)

    def send(self) -> None:
        begin = 0
        self._parts: list[_PartOfMessage] = []
        for part in self._given:
            self._parts.append(_PartOfMessage(part, self._own, self._theirs, begin))
            begin += part.words
        self._departure = self._wire.send(self._own, self._number)

    def merge(self) -> None:
        self._arrival.wait()
        self._departure.wait()  # the records are overwritten
        for part in self._parts:
            part.merge()


def swap_rows(tables: Sequence[TableSync], wire: Wire, most_bytes: int) -> None:
    """Merges all ids of all tables.

    Args:
        tables: the same ids in both replicas.
        wire: to the other replica.
        most_bytes: maximal bytes of rows in flight.
    """
    most = min(_MESSAGE_BYTES, most_bytes // (AHEAD + 1))
    messages = (
        _Message(parts, wire, number) for number, parts in enumerate(rounds(tables, most), start=1)
    )
    expected = deque(itertools.islice(messages, AHEAD + 1))
    sent: deque[_Message] = deque()
    while expected or sent:
        if expected and len(sent) <= AHEAD:
            expected[0].send()
            sent.append(expected.popleft())
            continue
        sent.popleft().merge()
        expected.extend(itertools.islice(messages, 1))
