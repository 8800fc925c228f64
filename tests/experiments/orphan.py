"""A parent with a worker that is busy, for a test that kills the parent. This file imports little: it starts twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from monkeyjump.experiments import worker


def busy(log: Path) -> None:
    """Work until Ctrl-C, and then wait for more, as a process of a pool does."""
    worker.GRACE = 1.0
    try:
        worker.stop_with_parent()
        log.write_text(f"busy {os.getpid()}")
        time.sleep(60)
    except KeyboardInterrupt:
        log.write_text("stopped")
        time.sleep(60)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    process = multiprocessing.get_context("spawn").Process(target=busy, args=(Path(sys.argv[1]),))
    process.start()
    process.join()
