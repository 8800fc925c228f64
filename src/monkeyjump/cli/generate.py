"""`monkeyjump generate`: an adapter's answer to a prompt, or to all prompts of a file."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from monkeyjump.errors import ConfigError


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """What `generate` and `chat` have in common."""
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of an answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, the most likely token")
    parser.add_argument("--task", help="task of the prompts, for an adapter that routes by task")
    parser.add_argument("--image", metavar="FILE", help="a picture before the prompt, for models that read pictures")
    parser.add_argument("--with-base", action="store_true", help="the base model's answer beside the adapter's")
    parser.add_argument("--base", metavar="MODEL", help="base model, where the adapter does not say")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", help="folder of a saved adapter")
    parser.add_argument("prompt", nargs="?", help="what is asked")
    parser.add_argument("--file", metavar="IN.jsonl", help='lines such as {"prompt": "..."} instead of one prompt')
    parser.add_argument("--out", metavar="OUT.jsonl", help="answers of --file; what it holds already is not done again")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="lines of --file at once (default: 8)")
    add_sampling(parser)


def run(options: argparse.Namespace) -> int:
    problems = []
    if (options.prompt is None) == (options.file is None):
        problems.append("name a prompt, or --file IN.jsonl with several: one of both.")
    if (options.file is None) != (options.out is None):
        problems.append("--file IN.jsonl and --out OUT.jsonl belong together.")
    if options.file is not None and options.image is not None:
        problems.append('--image belongs to one prompt. Lines of --file name theirs: {"prompt": ..., "image": ...}.')
    if options.batch < 1:
        problems.append(f"--batch {options.batch} must be at least 1.")
    if problems:
        raise ConfigError(problems, title="nothing to answer" if len(problems) == 1 else "options")

    from monkeyjump.serving.answers import Question, Sampling, load
    from monkeyjump.serving.files import answer_file
    from monkeyjump.tasks.media import Media

    how = Sampling(options.max_tokens, options.temperature)
    answering = partial(load, [options.adapter], options.base)
    if options.file is not None:
        source, out = (Path(path).expanduser() for path in (options.file, options.out))
        settings = {"batch": options.batch, "with_base": options.with_base, "task": options.task}
        done, new = answer_file(source, out, answering, how, **settings)
        print(f"{new} answers" + (f", {done} were there already" if done else "") + f"\nsaved       {out}")
        return 0
    answerer = answering()
    media = () if options.image is None else (Media("image", str(Path(options.image).expanduser())),)
    question = Question([{"role": "user", "content": options.prompt}], media, options.task)
    for name in answerer.names if options.with_base else answerer.names[:1]:
        (answer,) = answerer.answers([question], name, how)
        print(f"[{name}]\n{answer}" if options.with_base else answer)
    return 0
