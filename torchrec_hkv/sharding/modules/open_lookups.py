"""Frees training lookups whose backward has not run, before the rows of tables are replaced."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torchrec_hkv.backends.protocol import GroupLookup


def collect_open_lookups(lookups: Iterable[GroupLookup]) -> None:
    """Frees lookups whose output is not referenced any more.

    A lookup keeps its rows in place until its backward has run or its autograd graph is freed. A
    graph in a reference cycle is freed by the garbage collector only. A collection takes up to a
    second in a process that has imported TorchRec, so it runs only if a lookup is open.

    Args:
        lookups: the lookups of the tables whose rows are to be replaced.
    """
    if any(lookup.has_open_lookup() for lookup in set(lookups)):
        gc.collect()
