"""One variant in a process of its own, and the parent's end of it.

One JSON object per line both ways: the parent sends the job, the child answers `ready` (or `ended`, with its error) and
waits for `go`, then sends its rows and `paused`, and waits again. Everything else that it prints goes to its log.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from monkeyjump.bench.jobs import Job, Row, failure
from monkeyjump.record import jsonable

# Under the name of the command line, where importing the package imports nothing heavy: the job decides what it needs.
START = "import sys; sys.argv[0] = 'monkeyjump'; from monkeyjump.bench.child import main; sys.exit(main())"
TAIL = 1500  # characters of a log that tell why a process died


class Child:
    """The parent's end: starts the process, puts what it says into `events`."""

    def __init__(self, job: Job, logs: Path, threads: int, events: queue.Queue) -> None:
        self.job = job
        self.due = list(job.modes)
        self.found: dict[str, Row] = {}  # by mode: what its turns have measured so far
        self.lost: Row | None = None  # once it has ended: the reason that its unfinished rows give
        self.started = time.monotonic()
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{len(list(logs.iterdir())):02d}-{job.variant}.log"
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # its compile workers end with it
            )
        self.send(asdict(job))
        self.reader = threading.Thread(target=self._read, args=(events,), daemon=True)
        self.reader.start()

    def send(self, message: Row) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it has died: its end is reported as such
            self.process.stdin.write(json.dumps(jsonable(message)) + "\n")
            self.process.stdin.flush()

    def _read(self, events: queue.Queue) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            events.put((self, event))
            if event["event"] == "ended":
                return
        code = self.process.wait()
        last = self.log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        events.put((self, {"event": "ended", "error": failure(ChildProcessError(f"exit code {code}: {last}"))}))

    def end(self) -> None:
        """Stop the process and the workers it started, if they still run."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(timeout=10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def main() -> int:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # only messages may reach the parent

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(jsonable(message)) + "\n")
        channel.flush()

    plain = json.loads(sys.stdin.readline())
    job = Job(**{**plain, "modes": tuple(plain["modes"])})
    try:
        rows = job.load()
        say({"event": "ready"})
        while sys.stdin.readline():  # until the parent has gone
            for row in rows():
                say({"event": "row", "row": row})
            say({"event": "paused"})
    except Exception as error:
        import traceback

        traceback.print_exc()
        say({"event": "ended", "error": failure(error)})
        return 1
    return 0
