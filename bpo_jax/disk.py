"""Failures to write, in whatever words the library that was writing reports them."""

from __future__ import annotations

import errno
import os
import re

_WORDS = (
    re.compile(r"os_error_code='(\d+)'"),  # tensorstore
    re.compile(r"\(os error (\d+)\)"),  # Rust: safetensors, tokenizers
)
_UNWRITABLE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than is allowed",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the disk fails",
    errno.ENOTDIR: "a part of the path is no folder",
    errno.EEXIST: "a file is in the way",
}


def reason(error: BaseException) -> str | None:
    """Why nothing could be written, if that is what is behind `error`; None for any other error.

    An error counts as well when it was raised from one that does.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        number = _number(cause)
        if number in _UNWRITABLE:
            return f"{_UNWRITABLE[number]} ({os.strerror(number)})"
        cause = cause.__cause__ or cause.__context__
    return None


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = (pattern.search(str(error)) for pattern in _WORDS)
    return next((int(match[1]) for match in found if match), None)
