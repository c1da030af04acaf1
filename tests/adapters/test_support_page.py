"""`docs/support.md` says what the rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.support import all_tables, proved
from ds_dynatrain.support.markdown import markdown
from tools import support_pages
from tools.support_pages import filled

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_the_rows() -> None:
    pages = [(DOCS / "support.md").read_text()]
    assert filled(pages) == pages, "run: python tools/support_pages.py docs/support.md"


@pytest.mark.parametrize("name", all_tables())
def test_every_row_is_shown(name: str) -> None:
    text = markdown(name)
    for row in all_tables()[name]:
        assert row.key.rpartition(".")[2] in text or row.key in text
        assert row.verdict.value in text.lower()


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("gpu.md", ["proved", "gpus"]),
        ("fit.md", ["gpus"]),
        ("../README.md", ["gpus"]),
        ("versions.md", ["frameworks"]),
    ],
)
def test_pages_say_what_was_proved(page: str, names: list[str]) -> None:
    text = (DOCS / page).read_text()
    assert [text.count(f"<!-- table: {name} -->") for name in names] == [1] * len(names)
    assert filled([text]) == [text], (
        "run: python tools/support_pages.py docs/gpu.md docs/fit.md docs/versions.md README.md"
    )


def test_frameworks_say_how_it_went_and_by_what_it_is_known() -> None:
    """A cell says yes, that it was not tried, or why it is refused and what to do instead."""
    for row in json.loads(support_pages.FRAMEWORKS.read_text()):
        cells = [row[name] for name in support_pages.TRIED]
        assert all(re.fullmatch(r"yes|not tried|refused|refused: .+; .+", cell) for cell in cells), row
        assert "refused" not in cells or any(cell.startswith("refused: ") for cell in cells), row
        assert row["by"] and all(
            (DOCS.parent / each).is_file()
            if "/" in each
            else re.fullmatch(r"(by hand|imports alone), 20\d\d-\d\d-\d\d", each)
            for each in row["by"]
        ), row


def test_the_short_answer_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    never = support_pages.status().partition("**")[2]
    assert [words in never for words in ("over NCCL", "on several cards", "with nodes that come and go")] == [True] * 3
    proof = proved.Proof("8 × H100", "2030-01-01", "torch", "make")
    monkeypatch.setattr(support_pages, "HARDWARE", {("cuda", part): proof for part in proved.PARTS})
    assert support_pages.status() == "Jobs of a fixed size have run on GPUs: 8 × H100, the last on 2030-01-01."


@pytest.mark.parametrize("part", proved.ON_TEST_DEVICE)
def test_what_ran_on_the_test_device_names_its_test(part: str) -> None:
    assert part in proved.PARTS
    file, _, name = proved.ON_TEST_DEVICE[part].partition("::")
    text = (DOCS.parent / file).read_text()
    assert not name or f"def {name}" in text


def test_a_part_that_never_ran_is_warned_of() -> None:
    assert proved.unproved("cpu", proved.PARTS) == ()
    assert proved.unproved("cuda", ["digests", "elastic"]) == ("elastic",)
    assert "nodes that come and go" in proved.warning("cuda", ["digests", "elastic"])
    assert proved.warning("cuda", ["digests"]) == "" and proved.warning("cpu", proved.PARTS) == ""
    assert all(part in proved.PARTS for _, part in proved.HARDWARE)


def test_rows_that_say_the_same_share_a_line() -> None:
    """Also rows of several tables; a key without a note stands in the list below the table."""
    text = markdown("scheduler", "offload")
    assert text.count("|---|---|---|") == 1
    (line,) = [line for line in text.splitlines() if "offloading to NVMe" in line]
    assert all(f"`{key}`" in line for key in (".nvme_path", "zero_optimization.offload_param.max_in_cpu", "aio"))
    assert "`scheduler`, `scheduler.type` (`LRRangeTest`, " in text.partition("*Works*: ")[2]


def test_other_text_stays() -> None:
    marks = "\n".join(f"## {name}\n<!-- table: {name} -->\nold\n<!-- end -->\nprose" for name in all_tables())
    (page,) = filled([marks])
    assert page.count("prose") == len(all_tables()) and "\nold\n" not in page
    assert filled([page]) == [page]
    with pytest.raises(ConfigError, match="usage"):
        filled([marks.replace("<!-- table: usage -->", "")])
    with pytest.raises(ConfigError, match="none_such"):
        filled([marks + "\n<!-- table: none_such -->\n<!-- end -->"])
    with pytest.raises(ConfigError, match="zero"):
        filled([marks + "\n<!-- table: zero -->\n<!-- end -->"])
