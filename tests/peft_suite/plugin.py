"""The pytest plugin that runs PEFT's tests on our methods and compares what fails with the list of differences."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
import types
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest._code import Source
from _pytest.mark import ParameterSet
from peft import LoraConfig, VeraConfig
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer

from monkeyjump.config import PEFT_TYPE
from monkeyjump.tuner.layer import MonkeyJumpLayer
from tests.peft_suite import configs
from tests.peft_suite.differences import Difference, load

PACKAGE = "peft_tests"
SWAPPED = (LoraConfig, VeraConfig)  # the method of PEFT whose rows become ours; the second where tests have no LoRA
METHOD = "monkeyjump_method"  # name of the fixture that stands in for `LoraConfig` in a test's module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--methods", default="", help="methods to run, separated by commas; all where empty")
    parser.addoption("--all-files", action="store_true", help="every file runs, so every difference should be seen")


def pytest_configure(config: pytest.Config) -> None:
    asked = [name for name in config.getoption("--methods").split(",") if name]
    unknown = sorted(set(asked) - set(configs.method_names()))
    if unknown:
        raise pytest.UsageError(f"unknown methods {unknown}: choose from {', '.join(configs.method_names())}")
    _stand_in_for_what_is_not_here()
    _extend_injection()
    config.pluginmanager.register(Swap(asked or configs.method_names()), "peft-suite-swap")
    whole = not asked and config.getoption("--all-files")
    judge = Judge(load(Path(__file__).with_name("differences.toml")), whole)
    config.pluginmanager.register(judge, "peft-suite-judge")


def _stand_in_for_what_is_not_here() -> None:
    """Diffusers is only imported here, the hub is not asked for, and no test is left out for Conv1D."""
    diffusers: Any = types.ModuleType("diffusers")
    diffusers.__version__ = "0"
    diffusers.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})
    sys.modules.setdefault("diffusers", diffusers)
    testing_utils: Any = importlib.import_module(f"{PACKAGE}.testing_utils")
    testing_utils.hub_online_once = lambda model_id: contextlib.nullcontext()
    testing_common: Any = importlib.import_module(f"{PACKAGE}.testing_common")
    testing_common._skip_if_conv1d_not_supported = lambda *args: None  # all of ours adapt GPT-2's Conv1D


def _extend_injection() -> None:
    """Random adapters where a test asks for them, and task ids for methods that route by them."""
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[PEFT_TYPE]
    original = tuner.inject_adapter

    def inject_adapter(self: Any, model: torch.nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        original(self, model, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        if getattr(config, configs.RANDOM_START, False):
            _randomize(model, adapter_name)
        if config.granularity == "task":
            model.register_forward_pre_hook(_with_task_ids, with_kwargs=True, prepend=True)

    tuner.inject_adapter = inject_adapter


@torch.no_grad()
def _randomize(model: torch.nn.Module, adapter_name: str) -> None:
    for layer in model.modules():
        adapters: Any = getattr(layer, "monkeyjump_adapter", {})
        if isinstance(layer, BaseTunerLayer) and adapter_name in adapters:
            for name, parameter in adapters[adapter_name].named_parameters():
                # At 0.2, a model with every linear adapted amplifies rounding: merging then missed PEFT's tolerance of
                # 1e-4 for 16 of 4,000 seeds (DeBERTa-v2). At 0.1 the worst seed of 1,000 is at 3 % of it.
                scale = 0.02 if name.endswith("offset") else 0.1  # an offset may be raised to the 15th power
                parameter.copy_(scale * torch.randn(parameter.shape))


def _with_task_ids(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    rows = next(value.shape[0] for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return args, {"task_ids": torch.arange(rows) % 2, **kwargs}


@pytest.fixture(autouse=True)
def monkeyjump_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a test that makes its own `LoraConfig`, ours stands in for it; other fixtures make theirs after this one.

    So does our layer where the test counts the layers of PEFT's LoRA.
    """
    if hasattr(request, "param"):
        monkeypatch.setattr(request.module, "LoraConfig", request.param)
        monkeypatch.setattr(request.module, "LoraLayer", MonkeyJumpLayer, raising=False)


class Swap:
    """Puts our methods where PEFT's tests have its LoRA, and leaves out the tests without it."""

    def __init__(self, methods: list[str]) -> None:
        self.classes = [configs.config_class(method) for method in methods]
        self.swapped: set[int] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        ours = False
        for mark in metafunc.definition.iter_markers("parametrize"):
            rows = mark.args[1] if len(mark.args) > 1 else None
            if isinstance(rows, list) and self._swap_rows(rows):
                ours = True
                if isinstance(mark.kwargs.get("ids"), list):
                    mark.kwargs.pop("ids")  # type: ignore[attr-defined]
        if not ours and _uses_lora(metafunc):
            ids = [kind.__name__ for kind in self.classes]
            metafunc.parametrize(METHOD, self.classes, ids=ids, indirect=True)

    def _swap_rows(self, rows: list[Any]) -> bool:
        """Replace the rows with PEFT's methods by one of each of ours, in place; whether there are any."""
        kind = next((kind for kind in SWAPPED if any(_holds(row, kind) for row in rows)), None)
        if id(rows) not in self.swapped and kind is not None:
            kept = [row for row in rows if not any(map(configs.is_peft_method, _values(row))) or _holds(row, kind)]
            rows[:] = [new for row in kept for new in (self._copies(row) if _holds(row, kind) else [row])]
            self.swapped.add(id(rows))
        return id(rows) in self.swapped

    def _copies(self, row: Any) -> Iterator[Any]:
        if not all(configs.translatable(value) for value in _values(row)):
            return  # a setting that only PEFT's LoRA has, or a module that is not linear
        for kind in self.classes:
            values = [configs.translated(value, kind) for value in _values(row)]
            yield pytest.param(*values)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Give every test a seed of its own: torch starts from another one in every process, and PEFT sets few."""
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if method_of_item(item) is None]
        items[:] = [item for item in items if method_of_item(item) is not None]
        config.hook.pytest_deselected(items=others)


def _values(row: Any) -> list[Any]:
    """The parameters of one case: a tuple, what `pytest.param` makes of one, or a single value."""
    if isinstance(row, ParameterSet):
        row = row.values
    return list(row) if isinstance(row, (tuple, list)) else [row]


def _holds(row: Any, kind: type) -> bool:
    return any(value is kind or type(value) is kind for value in _values(row))


def _uses_lora(metafunc: pytest.Metafunc) -> bool:
    """Whether the test, a fixture of it or a method that it calls has `LoraConfig` in its code."""
    waiting: list[Any] = [metafunc.function]
    waiting += [fixture.func for fixtures in metafunc._arg2fixturedefs.values() for fixture in fixtures]
    seen: set[Any] = set()
    while waiting:
        code = getattr(inspect.unwrap(waiting.pop()), "__code__", None)
        inner = [code] if code is not None else []
        while inner:
            code = inner.pop()
            if code in seen:
                continue
            seen.add(code)
            if "LoraConfig" in code.co_names:
                return True
            inner += [part for part in code.co_consts if isinstance(part, types.CodeType)]
            holders = [holder for holder in (metafunc.cls, metafunc.module) if holder is not None]
            found = [getattr(holder, name, None) for holder in holders for name in code.co_names]
            waiting += [function for function in found if inspect.isfunction(function)]
    return False


def method_of_item(item: pytest.Item) -> str | None:
    """The method of ours that a test runs on; None for a test of PEFT alone."""
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    return next((method for value in values if (method := configs.method_of(value)) is not None), None)


class Judge:
    """Compares failures with the list of differences, and says which of these no longer fail."""

    def __init__(self, differences: list[Difference], whole: bool) -> None:
        self.differences = differences
        self.whole = whole
        self.counts: dict[tuple[str, str], Counter[str]] = {}
        self.unexplained: dict[str, list[str]] = {}  # error -> tests
        self.hits: Counter[Difference] = Counter()
        self.tried: Counter[Difference] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report: Any = yield
        method = method_of_item(item) or ""
        judged: dict[str, Any] = {"file": Path(str(item.fspath)).stem, "method": method, "outcome": report.outcome}
        numbers = [n for n, entry in enumerate(self.differences) if entry.concerns(item.nodeid, method)]
        if report.failed and call.excinfo is not None:
            error = f"{call.excinfo.typename}: {call.excinfo.value} <= {_statement(call.excinfo)}"
            number = next((n for n in numbers if self.differences[n].explains(error)), None)
            if number is None:
                judged["error"] = _one_line(error.rpartition(" <= ")[0] if "ConfigError" in error else error)
            else:
                report.outcome, report.wasxfail = "skipped", self.differences[number].reason
                judged |= {"outcome": "different", "hit": number}
        report.user_properties.append(("judged", {**judged, "tried": numbers}))  # processes of xdist send it along
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count, in the process that prints the summary."""
        judged = dict(report.user_properties).get("judged")
        if judged is None:
            return
        if "error" in judged:
            self.unexplained.setdefault(judged["error"], []).append(report.nodeid.rpartition("::")[2])
        if "hit" in judged:
            self.hits[self.differences[judged["hit"]]] += 1
        if report.when == "call" or (report.when == "setup" and judged["outcome"] != "passed"):
            self.tried.update(self.differences[number] for number in judged["tried"])
            self.counts.setdefault((judged["file"], judged["method"]), Counter())[judged["outcome"]] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("PEFT's tests on our methods")
        for entry, count in self.hits.most_common():
            terminalreporter.line(f"{count:6} intended: {entry.reason}")
        for entry in self.differences:
            expected = self.tried[entry] > 0 and (self.whole or entry.tests != "*")
            if expected and not self.hits[entry]:
                terminalreporter.line(
                    f"listed, but nothing fails so any more: {entry.tests} {entry.error}", yellow=True
                )
        for line in _table(self.counts):
            terminalreporter.line(line)
        for error, tests in sorted(self.unexplained.items(), key=lambda group: -len(group[1])):
            terminalreporter.line(f"{len(tests)} unexplained: {error}", red=True)
            for test in tests[:3]:
                terminalreporter.line(f"    {test}")


def _table(counts: dict[tuple[str, str], Counter[str]]) -> Iterator[str]:
    """One line for every method and file, and their sum; pytest's word for an unexplained failure is failed."""
    outcomes = {"passed": "passed", "different": "intended", "skipped": "skipped", "failed": "unexplained"}
    yield " ".join([f"{'method':16} {'file':26}", *(f"{title:>11}" for title in outcomes.values())])
    rows = [((method, file.removeprefix("test_")), row) for (file, method), row in counts.items()]
    total = sum((row for _, row in rows), Counter())
    for (method, file), row in [*sorted(rows), (("all", "all"), total)]:
        yield " ".join([f"{method:16} {file:26}", *(f"{row[outcome]:11}" for outcome in outcomes)])


def _statement(failure: pytest.ExceptionInfo) -> str:
    """The line of PEFT's tests that failed: most of their assertions have no message."""
    places = [(str(entry.path), entry.lineno) for entry in failure.traceback if PACKAGE in str(entry.path)]
    return _statement_at(*places[-1]) if places else ""


@functools.cache  # finding the ends of a statement parses its whole file, up to 0.3 s of the largest
def _statement_at(path: str, line: int) -> str:
    return str(Source(Path(path).read_text(encoding="utf-8")).getstatement(line)).strip()


def _one_line(error: str) -> str:
    text = re.sub("0x[0-9a-f]+", "0x", " ".join(error.split()))
    return text if len(text) < 400 else f"{text[:250]} ... {text[-150:]}"
