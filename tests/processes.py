"""Functions run in processes that know nothing of this one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing

PRELOADED = ["tests.helpers"]


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
