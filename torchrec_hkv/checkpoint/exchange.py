"""Exchanges the names of two folders in one atomic operation of the file system."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

#: ``AT_FDCWD`` and ``RENAME_EXCHANGE`` of Linux' renameat2(2).
_FROM_HERE = -100
_EXCHANGE = 2
#: Errors of file systems and kernels without this operation; EXDEV is that of overlay file systems.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


def exchange(first: Path, second: Path) -> bool:
    """Exchanges what two paths name. At every moment both paths exist.

    Returns:
        False, and nothing has changed, if the file system (NFS, for example) or the C library does
        not support it.

    Raises:
        OSError: the exchange failed although it is supported, for example because a path does not
            exist.
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
