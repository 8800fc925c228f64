from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from monkeyjump.errors import ConfigError
from monkeyjump.tasks.collate import PaddingCollator
from monkeyjump.tasks.encode import IGNORE, Encoder
from monkeyjump.tasks.task import AnswerFormat, Example

SHORT = Example(question="Hot?", options=("ice", "fire"), label=1, context="Fire burns.", task="t")
LONG = Example(question="Hot?", options=("ice", "fire"), label=1, context="abcdefghij" * 50, task="t")


@pytest.mark.parametrize(("answer_format", "said"), [("letter", "B"), ("text", "fire")])
def test_loss_is_on_the_answer_and_eos_only(tokenizer: Any, answer_format: AnswerFormat, said: str) -> None:
    encoder = Encoder(tokenizer, {"t": 3}, answer_format=answer_format)
    (encoded,) = encoder.encode_all([SHORT])
    labels = PaddingCollator(0)([encoded])["labels"][0]
    assert tokenizer.decode(labels[labels != IGNORE]) == said + "</s>"
    assert encoded.task_id == 3


def test_the_chat_template_is_applied_once(tokenizer: Any) -> None:
    (encoded,) = Encoder(tokenizer).encode_all([SHORT])
    text = tokenizer.decode(encoded.input_ids)
    assert text == "<s>user:Fire burns.\nHot?\nA. ice\nB. fire\nAnswer with the letter.</s><s>assistant:B</s>"


def test_training_and_evaluation_see_the_same_prompt_and_answers(tokenizer: Any) -> None:
    for example in (SHORT, LONG):
        encoder = Encoder(tokenizer, answer_format="text", max_length=200)
        (encoded,), (prompt,) = encoder.encode_all([example]), encoder.prompt_ids([example])
        target = example.target(encoder.answer_format)
        assert prompt is not None
        assert encoded.input_ids.tolist() == prompt + encoder.target_ids([target])[target]


@pytest.mark.parametrize("cut", ["end", "start"])
def test_only_the_context_is_cut(tokenizer: Any, cut: Any) -> None:
    example = Example(
        question=LONG.question, options=LONG.options, label=1, context="HEAD" + LONG.context + "TAIL", cut=cut
    )
    encoder = Encoder(tokenizer, answer_format="text", max_length=150)
    (encoded,) = encoder.encode_all([example])
    assert 140 < len(encoded) <= 150  # no more is given up than must be
    text = tokenizer.decode(encoded.input_ids)
    assert "\nHot?\nA. ice\nB. fire\nAnswer with the option's text.</s><s>assistant:fire</s>" in text
    assert ("HEAD" in text, "TAIL" in text) == ((True, False) if cut == "end" else (False, True))


def test_what_was_cut_and_dropped_is_counted(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer, max_length=120)
    hopeless = Example(question="why? " * 40, options=("a", "b"), label=0, context="c", task="u")
    kept = encoder.encode_all([SHORT, LONG, hopeless, LONG])
    assert len(kept) == 3
    assert dict(encoder.counts.truncated) == {"t": 2}
    assert dict(encoder.counts.dropped) == {"u": 1}
    assert dict(encoder.counts.encoded) == {"t": 3}


def test_cuts_do_not_break_characters(tokenizer: Any) -> None:
    example = Example(question="Q", options=("a", "b"), label=0, context="é" * 200)  # two tokens each here
    (encoded,) = Encoder(tokenizer, max_length=121).encode_all([example])
    assert "\ufffd" not in tokenizer.decode(encoded.input_ids)


@pytest.mark.parametrize(
    "content",
    ["m['content']", "m['content'] | trim", "m['content'] | upper", "m['content'][:100]", "m['content'] | e"],
)
def test_prompts_are_what_the_template_makes_of_them(tokenizer: Any, content: str) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = tokenizer.chat_template.replace("m['content']", f"({content})")
    examples = [SHORT, LONG, Example(question="  Why & how?\n", free_answer="x")]
    encoder = Encoder(other)
    messages = [{"role": "user", "content": ""}]
    for example in examples:
        messages[0]["content"] = example.prompt("letter")
        expected = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert encoder.prompt_text(example) == expected
    encoded = encoder.encode_all(examples)
    other(["a", "bb"], padding=True)  # leaves an option behind in the tokenizer
    for one, many in zip(examples, encoder.encode_all(examples), strict=True):
        (alone,) = Encoder(other).encode_all([one])
        assert many.input_ids.tolist() == alone.input_ids.tolist()
    assert [len(item) for item in encoded] == [len(item) for item in encoder.encode_all(examples)]


def test_a_tokenizer_that_does_more_than_its_backend(tokenizer: Any) -> None:
    class Lowering(PreTrainedTokenizerFast):
        def __call__(self, text: Any, **options: Any) -> Any:
            return super().__call__([each.lower() for each in text], **options)

    lowering = Lowering(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer), eos_token="</s>")
    lowering.chat_template = tokenizer.chat_template
    for item in Encoder(lowering, answer_format="text").encode_all([SHORT, LONG]):
        assert str(lowering.decode(item.input_ids)).islower()


def test_free_answers(tokenizer: Any) -> None:
    (encoded,) = Encoder(tokenizer).encode_all([Example(question="Name?", free_answer="Mia")])
    assert tokenizer.decode(encoded.input_ids) == "<s>user:Name?</s><s>assistant:Mia</s>"


def test_every_bad_argument_at_once(tokenizer: Any) -> None:
    with pytest.raises(ConfigError) as error:
        Encoder(tokenizer, answer_format="word", max_length=2)  # type: ignore[arg-type]
    assert len(error.value.problems) == 2
