"""Two folders change names in one step of the file system."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

#: ``AT_FDCWD`` and ``RENAME_EXCHANGE`` of Linux' renameat2(2).
_FROM_HERE = -100
_EXCHANGE = 2
#: What a file system or a kernel answers that can't do it; EXDEV where layers lie over each other.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


def exchange(first: Path, second: Path) -> bool:
    """Gives each of two paths what the other one named: nobody sees a moment without either.

    Returns:
        Whether it was done: not where the file system (NFS among them) or the C library can't.

    Raises:
        OSError: it can, but was refused, as where a path does not exist.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    arguments = _FROM_HERE, os.fsencode(first), _FROM_HERE, os.fsencode(second), _EXCHANGE
    if rename(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
