"""The exchanges of a sharded collection."""

from __future__ import annotations

from typing import Any

from torchrec_hkv.sharding.modules.multi_part_lookup import MultiPartOutputDist


def number_of_exchanges(collection: Any) -> int:
    """Returns the number of exchanges of rows in the forward of a step."""
    return sum(
        len(dist._dists) if isinstance(dist, MultiPartOutputDist) else 1
        for dist in collection._output_dists
    )
