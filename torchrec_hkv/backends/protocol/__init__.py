"""The interface of a backend. Sharding, planner and checkpoint know tables only through it.

A backend stores and trains the tables whose planner constraints name it. It is one object,
registered under its name (:mod:`torchrec_hkv.backends.registry`). :mod:`torchrec_hkv.sharding`
implements TorchRec's side (input distribution, collectives, output distribution) once, for all
backends, against the classes of this package.

A backend derives from :class:`Backend` (``backend.py``), and its tables from :class:`GroupLookup`
(``group_lookup.py``). Both get their methods from one module for each capability:

- ``state_dict.py``: the state of a table as tensors;
- ``entries.py``: rows, states and scores by id;
- ``files.py``: files of a checkpoint, and changes since an earlier one;
- ``replication.py``: tables that several ranks hold;
- ``training.py``: epochs and accumulation of gradients;
- ``counting.py``: counters and memory;
- ``costs.py``: memory and work, for the planner;
- ``choices.py``: options that the planner may choose.

A lookup may have further bases: :class:`CachedLookup` (``caches.py``) if its tables have caches.
"""

from torchrec_hkv.backends.protocol.backend import Backend
from torchrec_hkv.backends.protocol.caches import CachedLookup
from torchrec_hkv.backends.protocol.counting import DeviceCounters
from torchrec_hkv.backends.protocol.group_lookup import GroupLookup
from torchrec_hkv.backends.specs import (
    BackendOptions,
    Kept,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
)

__all__ = [
    "Backend",
    "BackendOptions",
    "CachedLookup",
    "DeviceCounters",
    "GroupLookup",
    "Kept",
    "OptimizerSpec",
    "StorageBytes",
    "TableShard",
    "TensorSpec",
]
