"""The command line: one verb per job, each in a file of its own that imports what it needs when it runs."""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
import warnings
from collections.abc import Sequence

from monkeyjump import __version__
from monkeyjump.errors import ConfigError, MonkeyJumpWarning
from monkeyjump.first_imports import without_advice_to_others

VERBS = {
    "train": "train an adapter from a recipe",
    "evaluate": "score an adapter on tasks, with the base model beside it",
    "compare": "train several methods over several seeds and print the table",
    "inspect": "draw what an adapter routes where, or two beside each other",
    "explore": "open a page that shows where the tokens of a prompt go",
    "generate": "answer a prompt, or a file of prompts, with an adapter",
    "chat": "talk with an adapter on the terminal",
    "serve": "answer requests of OpenAI's clients with adapters",
    "ablate": "run the studies of the paper: one thing varied, everything else the same",
    "forecast": "say before training whether tasks oppose each other",
    "study": "map where routing helps, over tasks whose conflict is a dial",
    "tune": "search settings of a recipe by validation",
    "export": "write an adapter for programs that do not know this package",
    "bench": "measure speed and memory",
    "tasks": "list the tasks and the state of their data",
    "methods": "list the methods and what they cost on a model",
    "models": "list the models that can be used by name",
    "validate": "check a recipe without running it",
    "run": "run another program with monkeyjump's adapters known to PEFT",
}
EPILOG = "Start with `monkeyjump train quickstart`. `monkeyjump VERB --help` says more about each."


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; `run` among them is what carries it out. A mistake ends the program, with the usage."""
    parser = argparse.ArgumentParser(
        prog="monkeyjump", description="Routed parameter-efficient fine-tuning.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"monkeyjump {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    asked = next((word for word in arguments if word in VERBS), None)
    for verb, summary in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if verb == asked:  # only the verb that runs is imported
            module = importlib.import_module(f"monkeyjump.cli.{verb}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    options, rest = parser.parse_known_args(arguments)
    # argparse takes a run of positional arguments in one place only; settings may stand anywhere
    settings = [word for word in rest if "=" in word and not word.startswith("-")] if "overrides" in options else []
    if len(settings) < len(rest):
        parser.error(f"unknown arguments: {' '.join(word for word in rest if word not in settings)}")
    if "overrides" in options:
        folder = [f"data.folder={options.data}"] if getattr(options, "data", None) else []
        options.overrides = [*options.overrides, *settings, *folder]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(list(sys.argv[1:] if argv is None else argv))
    without_advice_to_others()
    warnings.formatwarning = _format_warning
    try:
        return options.run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe went away
        return 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"error: {str(error.filename)[:200]!r}... is too long for the name of a file.", file=sys.stderr)
        return 2


_format_of_python = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our own warnings are sentences to a person; a line of source beside them says nothing."""
    if issubclass(category, MonkeyJumpWarning):
        return f"\nwarning: {message}\n"  # a progress bar may stand on the line
    return _format_of_python(message, category, filename, lineno, line)


if __name__ == "__main__":
    sys.exit(main())
