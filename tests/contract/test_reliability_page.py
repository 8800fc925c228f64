"""Every promise of docs/reliability.md names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_every_promise_has_its_test() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## Versions")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| promise", "|---"))]
    assert len(promises) > 20
    for row in promises:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row.rpartition(" | ")[2])
        assert named, row
        for file, test in named:
            assert (TESTS / file).is_file(), file
            assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8") or not test, (file, test)
