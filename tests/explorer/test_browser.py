"""The explorer's page in a real browser: what it shows is what the library says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from monkeyjump.evaluation.load import NamedAdapter
from monkeyjump.explorer import fragment, recorded, script_hash
from monkeyjump.explorer.engine import Explorer, Prompt, Side
from monkeyjump.models import load_model
from tests.explorer.conftest import serving, unpacked
from tests.helpers import adapted
from tests.visual import save_visual_model

COLOURS = [(230, 159, 0), (86, 180, 233), (0, 158, 115), (233, 237, 242)]  # of the first experts, and of none
TEXT = "The ending moved me."
CHIPS = """all => all.map(chip => [chip.textContent, getComputedStyle(chip).backgroundColor, chip.dataset.letter,
           chip.classList.contains("differs")])"""


def strongest(view: dict[str, Any], block: int) -> list[int]:
    """The expert of each token with the largest gate; -1 where all of the token's experts are off."""
    gates = unpacked(view)[:, 3 * block : 3 * block + 3]
    return np.where(gates.any(-1), gates.argmax(-1), -1).tolist()


def read(explorer: Explorer, adapter: str = "first", off: Any = None, text: str = TEXT) -> dict[str, Any]:
    return explorer.read(Prompt(text), Side(adapter, off or {})).view


def chips(page: Any, side: int = 1) -> list[list[Any]]:
    return page.locator(f".side:nth-child({side}) .chip").evaluate_all(CHIPS)


def type_in(page: Any, text: str) -> None:
    page.fill("textarea", text)
    page.press("textarea", "Enter")


def settled(page: Any, sides: int = 1) -> None:
    page.wait_for_selector(f".side:nth-child({sides}):last-child .chip")
    page.wait_for_selector(".status:empty", state="attached")


def shows(page: Any, view: dict[str, Any], block: int, side: int = 1) -> None:
    """The chips have the colours and letters of the strongest experts."""
    found = chips(page, side)
    assert [text for text, *_ in found] == [token.replace("\n", "↵") for token in view["tokens"]]
    best = strongest(view, block)
    assert [chip[1] for chip in found] == [f"rgb{COLOURS[e]}" for e in best]
    assert [chip[2] for chip in found] == [["Q", "K", "V", ""][e] for e in best]


@pytest.fixture
def open_page(page: Any, served: Any) -> Any:
    page.goto(served.url)
    type_in(page, TEXT)
    settled(page)
    return page


def test_colours_slider_keys_and_grid(open_page: Any, explorer: Explorer) -> None:
    page, view = open_page, read(explorer)
    shows(page, view, 0)
    page.fill("input[type=range]", "2")
    shows(page, view, 2)
    page.press("canvas", "ArrowUp")
    page.press("canvas", "ArrowRight")
    shows(page, view, 1)
    page.wait_for_url(re.compile("block=1"))
    assert page.locator(".chip.chosen").get_attribute("data-t") == "1"
    page.wait_for_timeout(50)  # a frame
    pixel = """(canvas, [t, b]) => {
        const width = (canvas.clientWidth - 34) / document.querySelectorAll(".chip").length;
        const cell = Math.max(7, Math.min(24, Math.floor(width))), scale = devicePixelRatio;
        return [...canvas.getContext("2d").getImageData((34 + t * cell + 3) * scale, (b * 22 + 3) * scale, 1, 1).data]
    }"""
    for t, b in ((3, 0), (7, 1), (12, 2), (20, 2)):
        assert tuple(page.locator("canvas").evaluate(pixel, [t, b])[:3]) == COLOURS[strongest(view, b)[t]]


def test_a_cell_tells_all_gates(open_page: Any, explorer: Explorer) -> None:
    page, view = open_page, read(explorer)
    page.hover(".chip[data-t='9']")
    gates, p = unpacked(view)[9, :3], unpacked(view, "probabilities")[9, :3]
    expected = [f"{gate:.3f}" if gate > 0 else f"({chance:.3f})" for gate, chance in zip(gates, p, strict=True)]
    assert page.locator(".cell .value").all_inner_texts() == expected
    assert page.locator(".cell .quoted").inner_text() == view["tokens"][9]
    box = page.locator("canvas").bounding_box()
    page.mouse.click(box["x"] + 34 + 2, box["y"] + 2 * 22 + 5)  # the first token in the last block
    gates = unpacked(view)[0, 6:]
    shown = page.locator(".cell .line:not(.below) .value").all_inner_texts()
    assert shown == [f"{gate:.3f}" for gate in gates if gate > 0]
    assert page.locator("input[type=range]").input_value() == "2"


def test_use_of_experts(open_page: Any, explorer: Explorer) -> None:
    page, gates = open_page, unpacked(read(explorer))[:, :3]
    shares = (gates > 0).sum(0) / (gates > 0).sum()
    assert page.locator("aside .panel:last-child .value").all_inner_texts() == [f"{100 * s:.1f} %" for s in shares]
    page.select_option("[aria-label='Usage of']", "opinion")
    assert page.locator(".stack >> nth=1").locator("i >> nth=0").get_attribute("title") == "q_proj 50.0 %"


def test_knocked_out_experts(open_page: Any, explorer: Explorer) -> None:
    page, off = open_page, {"0": ["q_proj"]}
    page.click("[title='Switch off q_proj in block 0']")
    settled(page, 2)
    before, after = read(explorer), read(explorer, off=off)
    shows(page, before, 0, side=1)
    shows(page, after, 0, side=2)
    assert not any(letter == "Q" for _, _, letter, _ in chips(page, 2))
    values = page.locator(".under .panel:first-child .value").all_inner_texts()
    assert [float(value.split()[0]) for value in values] == pytest.approx(
        [100 * p for view in (before, after) for _, p in view["next"]], abs=0.06
    )
    page.goto("about:blank")
    page.go_back()
    settled(page, 2)
    shows(page, after, 0, side=2)
    page.click("[title='Switch off k_proj in all blocks']")
    page.wait_for_selector("h2:has-text('k_proj of block 1, 2')")
    settled(page, 2)
    shows(page, read(explorer, off={"0": ["k_proj", "q_proj"], "1": ["k_proj"], "2": ["k_proj"]}), 0, side=2)
    assert "*" in page.url
    page.reload()
    page.wait_for_selector("h2:has-text('k_proj of block 1, 2')")
    page.click("text=Switch all on")
    settled(page, 1)


def test_two_adapters_beside_each_other(open_page: Any, explorer: Explorer) -> None:
    page = open_page
    page.select_option("select >> nth=1", "other")
    settled(page, 2)
    one, two = read(explorer), read(explorer, "other")
    shows(page, two, 0, side=2)
    differs = np.array([[a != b for a, b in zip(strongest(one, k), strongest(two, k), strict=True)] for k in range(3)])
    assert [chip[3] for chip in chips(page, 2)] == differs[0].tolist()
    assert f"differs in {differs.sum()} of {differs.size} cells" in page.locator(".drawn > .soft").inner_text()
    page.select_option("select >> nth=1", "base")
    page.wait_for_selector("text=The base model has no experts.")
    assert len(chips(page, 2)) == len(one["tokens"])


def test_generation_before_and_after(open_page: Any, explorer: Explorer) -> None:
    page, off = open_page, {"0": ["q_proj"]}
    page.fill("input[max='1024']", "5")
    page.click("text=Generate")
    page.wait_for_selector(".text[data-end*=' ']")
    page.click("[title='Switch off q_proj in block 0']")
    page.wait_for_selector(".side:nth-child(2) .text[data-end*=' ']")
    for side, spec in ((1, Side("first")), (2, Side("first", off))):
        *events, _ = explorer.generate(Prompt(TEXT), spec, 5, 0, 0)
        assert page.locator(f".side:nth-child({side}) .text").text_content() == events[-1]["text"]
        assert page.locator(f".side:nth-child({side}) .chip.made").count() == len(events)


@pytest.fixture
def endless(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer."""
    monkeypatch.setattr(explorer, "ends", set())


@pytest.mark.usefixtures("endless")
def test_generation_can_be_stopped(open_page: Any) -> None:
    page = open_page
    page.fill("input[max='1024']", "1024")
    page.fill("input[max='10']", "2")
    page.click("text=Generate")
    page.wait_for_selector(".chip.made")
    page.click("text=Stop")
    page.wait_for_selector(".status:text('Stopped.')")
    count = page.locator(".chip.made").count()
    page.wait_for_timeout(200)
    assert 0 < count == page.locator(".chip.made").count() < 1000


def test_empty_and_long_prompts(page: Any, served: Any, explorer: Explorer) -> None:
    page.goto(served.url)
    type_in(page, "  ")
    page.wait_for_selector(".wrong:text('Type a prompt first.')")
    type_in(page, "a" * 5000)
    page.wait_for_selector(".wrong:text('at most 4,096')")
    page.fill("textarea", "ab c" * 1000)
    page.press("textarea", "Enter")
    settled(page)
    assert page.locator(".chip").count() == 4000 + len("user:assistant:") + 3
    script = """slider => { const start = performance.now();
        for (const value of [1, 2, 0]) { slider.value = value; slider.dispatchEvent(new Event("input")); }
        return (performance.now() - start) / 3 }"""
    assert page.locator("input[type=range]").evaluate(script) < 250  # ms, at 4,000 tokens on a busy machine


def test_prompts_are_texts(page: Any, served: Any, explorer: Explorer) -> None:
    nasty = "<img src=x onerror=alert(1)><script>alert(2)</script> שלום عالم & é"
    page.goto(served.url)
    type_in(page, nasty)
    settled(page)
    shows(page, read(explorer, text=nasty), 0)
    assert page.locator(".results img, .results script").count() == 0
    page.reload()  # the same from the address
    settled(page)
    assert page.locator("textarea").input_value() == nasty
    assert page.locator("bdi.chip").count() == page.locator(".chip").count()


@pytest.mark.usefixtures("endless")
def test_a_server_that_was_stopped_is_told(page: Any, explorer: Explorer) -> None:
    with serving(explorer) as served:
        page.goto(served.url)
        type_in(page, TEXT)
        settled(page)
        page.fill("input[max='1024']", "1024")
        page.fill("input[max='10']", "2")
        page.click("text=Generate")
        page.wait_for_selector(".chip.made")
    page.wait_for_selector(".wrong:text('The server does not answer')")
    assert page.locator(".chip").count() > 0
    type_in(page, "Another.")
    page.wait_for_selector(".wrong:text('The server does not answer')")
    assert page.locator("text=Stop").is_disabled()


def test_the_token_is_taken_from_the_address(page: Any, explorer: Explorer) -> None:
    with serving(explorer, token="secret-token") as served:
        page.goto(served.url)
        page.wait_for_selector(".wrong:text('The token is missing')")
        page.goto(f"{served.url}#token=secret-token&prompt=Hello&block=1")  # in the same document
        settled(page)
        assert "secret" not in page.url
        assert page.locator("input[type=range]").input_value() == "1"


def test_a_picture_is_dropped(page: Any, explorer: Explorer, tmp_path: Path) -> None:
    model, processor = load_model(str(save_visual_model(tmp_path / "model")))
    visual = Explorer(adapted(model), processor, {"visual": NamedAdapter("default")})
    Image.new("RGB", (28, 28), "red").save(tmp_path / "red.png")
    with serving(visual) as served:
        page.goto(served.url)
        page.fill("textarea", "What?")
        page.set_input_files("input[type=file]", tmp_path / "red.png")
        settled(page)
        assert page.locator(".chip:text('<image>')").count() > 1
        assert page.locator("img").evaluate("image => image.complete && image.naturalWidth") == 28
        (tmp_path / "bad.png").write_bytes(b"no picture")
        page.set_input_files("input[type=file]", tmp_path / "bad.png")
        page.wait_for_selector(".wrong:text('of 10 bytes')")


def test_a_prompt_before_the_page_knows_its_adapters(page: Any, served: Any, explorer: Explorer) -> None:
    held = list[Any]()

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/api/about", hold)
    page.goto(served.url)
    type_in(page, TEXT)
    page.wait_for_timeout(50)
    held.pop().continue_()
    settled(page)
    shows(page, read(explorer), 0)
    page.unroute("**/api/about")


def test_a_server_that_comes_back_is_asked_again(page: Any, served: Any, explorer: Explorer) -> None:
    page.route("**/api/about", lambda route: route.abort())
    page.goto(served.url)
    page.wait_for_selector(".wrong:text('The server does not answer')")
    page.unroute("**/api/about")
    type_in(page, TEXT)
    settled(page)
    shows(page, read(explorer), 0)


def test_narrow_screens(browser: Any, served: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"{served.url}#right=other&prompt=A+{'long' * 60}+prompt")
    settled(page, 2)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_the_recorded_page_needs_no_server(page: Any, explorer: Explorer, tmp_path: Path) -> None:
    explorer.model.set_adapter("default")
    html, css, js = fragment(recorded(explorer.model, explorer.tokenizer, [TEXT, "</script><b>Second</b>"]))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {script_hash(js)}"
    path = tmp_path / "report.html"
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>{css}</style><body>{html}<script>{js}</script></body>",
        encoding="utf-8",
    )
    page.goto(path.as_uri())
    settled(page)
    shows(page, read(explorer), 0)
    page.fill("input[type=range]", "1")
    shows(page, read(explorer), 1)
    page.select_option("select >> nth=0", index=1)
    page.wait_for_selector(".chip:text('S')")
    shows(page, read(explorer, text="</script><b>Second</b>"), 1)
    assert page.locator("text=Generate").count() == page.locator("text=off here").count() == 0
