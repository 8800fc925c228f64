"""Answers about pictures and clips on the page of an evaluation."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pytest

from monkeyjump.evaluation.report import EvaluationReport, ReportRow
from monkeyjump.evaluation.score import NO_ANSWER, Prediction
from monkeyjump.evaluation.shown import RIGHT, SIDE, WRONG, ShownAnswer, chosen_answers
from monkeyjump.tasks.media import Media
from monkeyjump.tasks.task import Example
from tests.tasks.pictures import Image, clip, picture


def page(*answers: ShownAnswer) -> str:
    row = ReportRow("task", "zoo", "own", "accuracy", 1, base=0.5)
    return EvaluationReport([row], [row], row, shown={"zoo": list(answers)}).to_html()


def thumbnails(html: str) -> list[Image.Image]:
    found = re.findall(r'<img alt="[^"]+" width="\d+" height="\d+" src="data:image/jpeg;base64,([^"]+)">', html)
    return [Image.open(io.BytesIO(base64.b64decode(each))) for each in found]


@pytest.fixture
def media(tmp_path: Path) -> list[Media]:
    """A wide picture, a high one as bytes, a clip that begins black, and two broken files."""
    (tmp_path / "wide.png").write_bytes(picture((250, 10, 10), (600, 200)))
    (tmp_path / "half<.jpg").write_bytes(picture(size=(300, 300), form="JPEG")[:200])
    files = [("image", "wide.png"), ("video", clip(tmp_path / "a.mkv").name), ("image", "half<.jpg"), ("video", "no")]
    found = [Media(kind, str(tmp_path / name)) for kind, name in files]  # type: ignore[arg-type]
    return [found[0], Media("image", picture((10, 10, 250), (50, 300))), *found[1:]]


def test_a_thumbnail_beside_every_answer(media: list[Media]) -> None:
    example = Example("Which <b>animal</b>?", ("a dog", "a cat"), 1, media=tuple(media[:3]))
    html = page(ShownAnswer(example, {"base": "a dog", "adapter": "a cat"}, True))
    wide, high, frame = thumbnails(html)
    assert (wide.size, high.size, frame.size) == ((SIDE, 40), (20, SIDE), (32, 16))
    assert wide.getpixel((60, 20)) == pytest.approx((250, 10, 10), abs=6)
    assert frame.getpixel((20, 8)) == pytest.approx((0, 0, 0), abs=20)
    assert "<h2>zoo: 0 wrong and 1 right answers</h2>" in html
    assert '<figure class="right several">' in html
    assert "Which &lt;b&gt;animal&lt;/b&gt;?" in html
    assert "<dt>right</dt><dd>a cat</dd><dt>base</dt><dd>a dog</dd><dt>adapter</dt><dd>a cat</dd>" in html


def test_a_broken_file_is_a_line_of_text(media: list[Media], tmp_path: Path) -> None:
    answer = ShownAnswer(Example("?", free_answer="x", media=tuple(media[3:])), {"base": "y"}, False)
    html = page(answer)
    assert thumbnails(html) == []
    assert "<em>image half&lt;.jpg cannot be read</em><em>video no cannot be read</em>" in html
    assert '<figure class="wrong several">' in html
    assert str(tmp_path) not in html


def test_many_pictures_are_counted(media: list[Media]) -> None:
    html = page(ShownAnswer(Example("?", free_answer="x", media=(media[0],) * 6), {"base": "x"}, True))
    assert len(thumbnails(html)) == 4
    assert "<span>and 2 more</span>" in html


def test_wrong_answers_come_first_and_lie_far_apart() -> None:
    """An encoder may leave examples out: predictions say which ones they are about."""
    examples = [Example(str(n), ("no", "yes"), 1) for n in range(41)]
    said = [Prediction(n, n % 2, 1, bool(n % 2)) for n in range(1, 41)]
    base = [Prediction(n, -1, 1, False, text="hm" if n % 4 else None) for n in range(1, 41)]
    found = chosen_answers(examples, {"base": base, "adapter": said})
    assert [answer.correct for answer in found] == [False] * WRONG + [True] * RIGHT
    asked = [int(answer.example.question) for answer in found]
    assert (asked[0], asked[WRONG - 1], asked[WRONG], asked[-1]) == (2, 40, 1, 39)
    assert len(set(asked)) == len(asked)
    assert found[0].said == {"base": "hm", "adapter": "no"}
    assert found[WRONG - 1].said == {"base": NO_ANSWER, "adapter": "no"}
    assert chosen_answers(examples, {"base": []}) == []


def test_a_page_of_texts_has_no_pictures(report: EvaluationReport) -> None:
    assert report.shown == {}
    assert "<figure" not in report.to_html()
