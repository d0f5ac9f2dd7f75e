"""The backend ``hkv``: a hash table that takes any 64-bit id and evicts when full."""

from torchrec_hkv.backends.hkv.backend import HKVBackend
from torchrec_hkv.backends.hkv.options import HKVOptions

__all__ = ["HKVBackend", "HKVOptions"]
