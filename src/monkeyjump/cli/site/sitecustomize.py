"""Found first on the path by programs started with `monkeyjump run`: registers the method, then hands over."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _next_sitecustomize() -> None:
    """Run the sitecustomize this one hides, if the environment has one."""
    elsewhere = [path for path in sys.path if os.path.abspath(path or os.curdir) != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_next_sitecustomize()
if importlib.util.find_spec("monkeyjump") is not None:  # a child may be another Python, which has not got it
    import monkeyjump  # noqa: F401  imports nothing heavy: the method is registered if the child imports PEFT
