"""A parent with a worker that is busy, for a test that kills the parent. This file imports little: it starts twice."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from pathlib import Path

from monkeyjump.experiments.worker import stop_with_parent


def busy(log: Path) -> None:
    try:
        stop_with_parent()
        log.write_text("busy")
        time.sleep(60)
    except KeyboardInterrupt:
        log.write_text("stopped")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    process = multiprocessing.get_context("spawn").Process(target=busy, args=(Path(sys.argv[1]),))
    process.start()
    process.join()
