"""What was made of data before, kept on disk under a hash of everything that it follows from: it is never out of date.

Entries are in `data` of the cache folder. Nothing in them is run. One that cannot be read, or is not what was written,
counts as missing; where nothing can be written, the work is done again the next time.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from monkeyjump.record import write_atomic

_DAYS, _BYTES = 30, 2 * 2**30  # entries not used for so long are dropped, and the oldest beyond this size
_DIGEST = 32


def key(*parts: Any) -> str:
    """A name for what follows from these values alone; they are told apart by how they are printed."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(repr(part).encode(errors="surrogatepass") + b"\0")
    return digest.hexdigest()


def read(name: str) -> memoryview | None:
    """An entry, or None."""
    path = folder() / name
    try:
        content = memoryview(path.read_bytes())
    except OSError:
        return None
    with suppress(OSError):
        os.utime(path)
    return content[_DIGEST:] if content[:_DIGEST] == _digest(content[_DIGEST:]) else None


def write(name: str, content: bytes) -> None:
    """Keep an entry. Processes that write the same one at the same time write the same, each in one rename."""
    with suppress(OSError):
        write_atomic(folder() / name, _digest(content) + content, cached=True)
        _drop_old()


def folder() -> Path:
    from monkeyjump.models.bundled import cache_dir

    return cache_dir() / "data"


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _drop_old() -> None:
    known: list[tuple[float, int, Path]] = []
    for path in list(folder().iterdir()):
        with suppress(OSError):  # another process may have renamed or dropped it, here as below
            known.append((path.stat().st_mtime, path.stat().st_size, path))
    total = 0
    for written, size, path in sorted(known, reverse=True):
        total += size
        if total > _BYTES or time.time() - written > _DAYS * 86_400:
            with suppress(OSError):
                path.unlink()
