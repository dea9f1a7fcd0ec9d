"""Reading a file that somebody named: regular files and /dev/null only, as a FIFO or a terminal would be waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_file(path: Path, limit_bytes: int) -> bytes:
    """The file's bytes, at most `limit_bytes` of them. Raises `OSError` where it is no regular file or cannot be read."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode) and not os.path.samestat(status, os.stat(os.devnull)):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with path.open("rb") as file:
        return file.read(limit_bytes)
