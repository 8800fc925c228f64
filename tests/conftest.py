"""Settings of the whole suite."""

from __future__ import annotations

import os

# No test may reach for the network: set before anything imports huggingface_hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
