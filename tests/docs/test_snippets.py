"""Blocks of the pages: `python` and `bash` run as they stand, `py` is a fragment that names what is there.

In `make test` torchrun's processes are forked, and not new ones, as those of the README are (test_install).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_dynatrain.engine.pipeline_engine import DynatrainPipelineEngine
from tests.docs.pages import FENCE, INDEX, README, ROOT, blocks, text_of
from tests.elastic.forked_torchrun import put_in_place
from tests.elastic.warm import nursery

PAGES = sorted([README, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
NOW = {"docs/script.md"}
"""What `make test` runs, besides the README (test_install); `make test-all` runs all."""
ELSEWHERE = {
    *("docs/accelerate.md", "docs/huggingface.md", "docs/balance.md", "docs/dev/format.md"),
    *(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "figures").glob("*.md")),
}
"""Pages with tests of their own, and those of measurements."""
NOT_STANDING_ALONE = {"docs/tutorial.md": ["README.md"]}
"""Pages that start the scripts of others."""
SET_BY_CONSTRUCTORS = {"device", "global_rank", "global_samples", "global_steps", "module", "optimizer"}
"""What DeepSpeed's engine has besides names of its class."""
SECONDS = 420


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def scripts(page: Path) -> Iterator[tuple[str, str]]:
    """Files on a page, with the names in their first lines."""
    for text in blocks(page, "python"):
        if found := re.match(r"# (\w+\.py)\n", text):
            yield found[1], text


def runs(page: Path) -> list[tuple[str, str]]:
    """Each `bash` block, and the block with what it prints if that follows at once."""
    found = []
    for fence in FENCE.finditer(text_of(page)):
        if fence[2] == "bash":
            after = FENCE.match(text_of(page), fence.end() + 2)
            found.append((textwrap.dedent(fence[3]), after[3] if after and after[2] == "text" else ""))
    return found


def pattern(line: str) -> str:
    """A line that is printed, with any numbers and with anything for `...`."""
    parts = re.split(r"(\.\.\.|\d[\d.,]*)", line.strip())
    fits = {"...": ".*"}
    return "".join(fits.get(part, r"[\d.,]+" if part[:1].isdigit() else re.escape(part)) for part in parts)


def lays_out(page: Path, folder: Path) -> None:
    """The files that a reader has beside the commands of a page."""
    (folder / "toy.py").write_text(dict(scripts(INDEX))["toy.py"])
    for source in (page, *(ROOT / other for other in NOT_STANDING_ALONE.get(name_of(page), ()))):
        for name, text in scripts(source):
            (folder / name).write_text(text)
    for below in ("examples", "tools"):
        (folder / below).symlink_to(ROOT / below)


def test_pages_say_where_toy_is() -> None:
    needing = [page for page in PAGES if page != INDEX and "from toy import" in text_of(page)]
    assert len(needing) > 7
    assert [name_of(page) for page in needing if "#run-the-snippets" not in text_of(page)] == []


WITH_COMMANDS = [page for page in PAGES if runs(page) and name_of(page) not in ELSEWHERE]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=() if name_of(page) in NOW else pytest.mark.full)
        for page in WITH_COMMANDS
    ],
)
def test_commands_run_and_print_what_the_page_says(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    lays_out(page, tmp_path)
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    lent: list[int] = []
    if request.config.option.markexpr == "not full" and any("torchrun" in command for command, _ in runs(page)):
        quiet |= put_in_place(tmp_path / ".forked", nursery())
        lent = [nursery().fileno()]
    for command, printed in runs(page):
        ran = subprocess.run(
            ["bash", "-euc", command],
            cwd=tmp_path,
            env={**os.environ, **quiet},
            pass_fds=lent,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        said = [line.strip() for line in ran.stdout.splitlines()]
        for line in filter(None, printed.splitlines()):
            wanted = pattern(line)
            assert any(re.fullmatch(wanted, each) for each in said), f"{line}\nis not in\n{ran.stdout}"


def test_each_script_is_run_by_a_command() -> None:
    for page in PAGES:
        asked = " ".join(command for command, _ in runs(page))
        for name, _ in scripts(page):
            assert name == "toy.py" or name in asked or name_of(page) in ELSEWHERE, f"{name} of {name_of(page)}"
        whole = len(list(blocks(page, "python"))) - len(list(scripts(page)))
        assert whole == 0 or name_of(page) in ELSEWHERE, f"{name_of(page)}: a fragment is marked py, not python"


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "py"))], ids=name_of)
def test_fragments_name_what_is_there(page: Path) -> None:
    for text in blocks(page, "py"):
        for node in ast.walk(ast.parse(textwrap.dedent(text))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "engine":
                assert hasattr(DynatrainPipelineEngine, node.attr) or node.attr in SET_BY_CONSTRUCTORS, node.attr
