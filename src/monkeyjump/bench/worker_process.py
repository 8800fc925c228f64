"""One variant in a process of its own, so that its peak of memory and its crash are its own; or in this process.

Either is asked to "prepare" first and then for the row of a mode. It answers with a dict whose status is "ready", "ok"
or "failed". What a process of its own prints goes to its log.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Under the command line's name, importing the package imports nothing heavy: the measurement decides what it needs.
START = "import sys; sys.argv[0] = 'monkeyjump'; from monkeyjump.bench.worker_process import work; work()"
LOG_TAIL = 1500  # characters of a log that tell why a process died


def failure(error: BaseException) -> Row:
    """What a row says of a variant that did not work."""
    text = " ".join(str(error).split())
    return {"status": "failed", "error_type": type(error).__name__, "error": f"{type(error).__name__}: {text}"[:2000]}


class ThisProcess:
    """A variant that is measured here."""

    def __init__(self, measurement: Any, tracebacks: bool = False) -> None:
        self.measurement, self.tracebacks = measurement, tracebacks
        self.run: Any = None

    def ask(self, question: str) -> Row:
        try:
            if self.run is not None:
                return self.run.row(question)
            self.run = self.measurement.prepared()
            return {"status": "ready"}
        except Exception as error:
            if self.tracebacks:
                traceback.print_exc()
            return failure(error)

    def end(self) -> None:
        import torch
        import torch._dynamo

        self.run = None
        torch._dynamo.reset()
        if torch.cuda.is_available():
            gc.collect()  # models with hooks are cycles, and must not be in the next variant's peak
            torch.cuda.empty_cache()


class WorkerProcess:
    """A variant that is measured in a process of its own, which imports nothing heavy before it is asked."""

    def __init__(self, measurement: Any, logs: Path, threads: int, timeout: float) -> None:
        self.measurement, self.timeout = measurement, timeout
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{len(list(logs.iterdir())):02d}-{measurement.variant}.log"
        self.lost: Row | None = None  # once it has died or taken too long
        self.connection, theirs = Pipe()
        with theirs, self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
                env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)},
                start_new_session=True,  # its compile workers end with it
            )

    def ask(self, question: str) -> Row:
        if self.lost is not None:
            return self.lost
        try:
            self.connection.send(self.measurement if question == "prepare" else question)
            if self.connection.poll(self.timeout):
                return self.connection.recv()
            self.lost = failure(TimeoutError(f"no answer to {question!r} within {self.timeout:g} s"))
        except (EOFError, OSError):
            last_words = self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            self.lost = failure(ChildProcessError(f"exit code {self.process.wait()}: {last_words}"))
        self.end()
        return self.lost

    def end(self) -> None:
        """Stop the process and the workers it started, if they still run."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def work() -> None:
    """The process's own end: it answers until the parent is gone."""
    connection: Connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, BrokenPipeError):
        variant = ThisProcess(connection.recv(), tracebacks=True)
        connection.send(variant.ask("prepare"))
        while True:
            connection.send(variant.ask(connection.recv()))
