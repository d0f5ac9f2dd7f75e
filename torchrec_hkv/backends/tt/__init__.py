"""The backend ``tt``: Tensor-Train tables, hundreds of times smaller than dense ones."""

from torchrec_hkv.backends.tt.backend import TTBackend
from torchrec_hkv.backends.tt.options import TTOptions

__all__ = ["TTBackend", "TTOptions"]
