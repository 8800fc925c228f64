"""`monkeyjump chat`: a conversation with an adapter on the terminal."""

from __future__ import annotations

import argparse

from monkeyjump.cli.generate import add_sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", help="folder of a saved adapter")
    add_sampling(parser)


def run(options: argparse.Namespace) -> int:
    from monkeyjump.serving.answers import Sampling, load
    from monkeyjump.serving.chat import chat

    how = Sampling(options.max_tokens, options.temperature)
    answerer = load([options.adapter], options.base)
    answerer.task_id(answerer.names[0], options.task)  # an adapter that needs a task says so before the first turn
    try:
        chat(answerer, answerer.names if options.with_base else answerer.names[:1], how, options.task, options.image)
    except KeyboardInterrupt:  # at the prompt
        print()
    return 0
