"""A conversation on the terminal, or through pipes: answers are shown while they are made."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from transformers import TextStreamer

from monkeyjump.errors import ConfigError
from monkeyjump.serving.answers import Answerer, Question, Sampling
from monkeyjump.tasks.media import Media

HELP = "/reset forgets the conversation, /exit ends it"
PICTURES = "/image FILE begins one about a picture, "


def chat(
    answerer: Answerer,
    names: Iterable[str],
    how: Sampling,
    task: str | None = None,
    image: str | None = None,
    lines: Iterable[str] | None = None,
) -> None:
    """Answer each line, by every name in turn; each keeps a conversation of its own. A picture stands before it."""
    histories: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    media = () if image is None else _picture(answerer, image)
    sees = "" if answerer.prompts.pictures is None else PICTURES
    print(f"{', '.join(histories)}: {sees}{HELP}", flush=True)
    for line in _typed() if lines is None else lines:
        text = line.strip()
        if text == "/exit":
            return
        command, _, path = text.partition(" ")
        if text == "/reset" or command == "/image":
            try:
                media = () if text == "/reset" else _picture(answerer, path.strip())
            except ConfigError as error:
                print(f"error: {error}", flush=True)
                continue
            for history in histories.values():
                history.clear()
            said = f"is about {Path(str(media[0].content)).name}" if media else "is forgotten"
            print(f"(the conversation {said})", flush=True)
        elif text:
            for name, history in histories.items():
                question = Question([*history, {"role": "user", "content": text}], media, task)
                _turn(answerer, name, history, question, how)


def _picture(answerer: Answerer, path: str) -> tuple[Media, ...]:
    """A picture that the model can read."""
    media = (Media("image", str(Path(path).expanduser())),)
    answerer.prompts.ids([{"role": "user", "content": ""}], media)  # refuses what is none, and models that read none
    return media


def _typed() -> Iterable[str]:
    """What is typed, or comes through a pipe, until it ends."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return


def _turn(answerer: Answerer, name: str, history: list[dict[str, str]], question: Question, how: Sampling) -> None:
    """One question and its answer. One that fails or is interrupted is not part of the conversation."""
    print(f"[{name}] ", end="", flush=True)
    try:
        streamer = TextStreamer(answerer.tokenizer, skip_prompt=True, skip_special_tokens=True)
        (answer,) = answerer.answers([question], name, how, streamer)
    except ConfigError as error:
        print(f"\nerror: {error} {HELP}.", flush=True)
        return
    except KeyboardInterrupt:
        print("\n(interrupted)", flush=True)
        return
    history += [question.messages[-1], {"role": "assistant", "content": answer}]  # type: ignore[list-item]
