"""Tasks and their data. Light to import; `mixture` and `collate` are imported where tensors are needed."""

from monkeyjump.tasks.catalog import TaskState, describe, expand, get, groups, names, register
from monkeyjump.tasks.custom import simple_task
from monkeyjump.tasks.load import load_examples
from monkeyjump.tasks.task import Example, FileSource, GeneratedSource, HubSource, Task

__all__ = ["Example", "FileSource", "GeneratedSource", "HubSource", "Task", "TaskState", "describe", "expand", "get"]
__all__ += ["groups", "load_examples", "names", "register", "simple_task"]
