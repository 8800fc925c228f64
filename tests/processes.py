"""Functions run in processes that know nothing of this one."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

PRELOADED = ["tests.helpers", "monkeyjump.training.run", "monkeyjump.cli.main"]


def in_new_processes(function: Callable[..., None], *arguments: Any, count: int = 1) -> None:
    """Call `function(rank, *arguments)` in `count` processes at once; what one of them raises is raised here.

    All are copies of one server that has imported the library and run nothing: the seconds of the imports are spent
    once a worker of the suite.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(function, arguments, nprocs=count, start_method="forkserver")


def start_process(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """One more copy of that server, which its caller ends."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    return process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join_group(rank: int, port: int, world: int) -> None:
    """Make this process a rank of a gloo group that gives up soon: a test that deadlocks fails within a minute."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=60))
