"""Is the Hugging Face hub there, and what of it is on this disk already? Answers in seconds, never in minutes."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

PROBE_SECONDS = 3.0


def offline_switch() -> str | None:
    """The environment variable that forbids the network, if one is set."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@cache
def _probe(url: str, seconds: float) -> bool:
    """One HEAD request through whatever proxy is set. In a thread, because no timeout covers a slow name server."""
    answer: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds):
                answer.append(True)
        except urllib.error.HTTPError as error:
            answer.append(error.code < 500)  # it refused this page, but it is there
            error.close()
        except (OSError, ValueError):
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True, name="hub-probe")
    thread.start()
    thread.join(seconds)
    return bool(answer and answer[0])


def hub_reachable(seconds: float = PROBE_SECONDS) -> bool:
    """True when the hub may be used and answers within `seconds`. Asked once per process and endpoint."""
    return offline_switch() is None and _probe(endpoint(), seconds)


def why_unreachable() -> str:
    """Why `hub_reachable` said no, in words for an error message."""
    switch = offline_switch()
    return f"{switch} is set" if switch else f"{endpoint()} did not answer within {PROBE_SECONDS:g} s"


def cached_snapshot(repo_id: str, revision: str | None = None) -> Path | None:
    """The folder of a hub model in the Hugging Face cache, if its config is there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None
