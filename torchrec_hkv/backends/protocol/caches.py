"""Tables with caches whose rows are selected on request."""

from __future__ import annotations

import abc


class CachedLookup(abc.ABC):
    """A further base of a backend's lookup, for :func:`torchrec_hkv.sharding.populate_caches`."""

    @abc.abstractmethod
    def populate_caches(self) -> int:
        """Selects again which rows the tables' caches hold.

        Returns:
            Number of caches.
        """
