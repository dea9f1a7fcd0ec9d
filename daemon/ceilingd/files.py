"""Reading a file that somebody named: regular files only, as opening a FIFO waits for ever and a device never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_file(path: Path, limit_bytes: int) -> bytes:
    """The file's bytes, at most `limit_bytes` of them. Raises `OSError` where it is no regular file or cannot be read."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with path.open("rb") as file:
        return file.read(limit_bytes)
