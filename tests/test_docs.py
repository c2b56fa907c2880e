"""docs/ says what the code does: its example is run, its messages are looked for in the source."""

import dataclasses
import doctest
import re
from pathlib import Path

import pytest

from verl_otb.integration.config import Options

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def section(title: str) -> str:
    """The text under a heading, as far as the next one of its rank."""
    rank = title.split(" ", 1)[0]
    return re.split(rf"^{rank} ", REFERENCE.split(f"\n{title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """What the first column of a text's tables has between its first pair of backticks."""
    return re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)


def source() -> str:
    """The package's source, with string literals that go on in the next line joined."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_examples(page):
    found = doctest.testfile(str(page), module_relative=False)
    assert found.failed == 0


def test_the_page_with_the_worked_example_has_it():
    assert doctest.testfile(str(ROOT / "docs" / "how-it-works.md"), module_relative=False).attempted > 5


def test_messages_are_the_code_s():
    code = source()
    messages = [message for message in first_cells(section("## Errors")) if " " in message]
    assert len(messages) > 20
    for message in messages:
        for piece in filter(None, (piece.strip(" .") for piece in message.split("…"))):
            assert piece in code, f"{message!r}: {piece!r} is nowhere in src/"


def test_options_and_variables_are_complete():
    options = {name.rsplit(".", 1)[1] for name in first_cells(section("## Options")) if ".otb." in name}
    assert options == {field.name for field in dataclasses.fields(Options)}
    read = set(re.findall(r'environ(?:\.get|\.setdefault)?[\[(]"(\w+)"', source()))
    set_by_ray = {"RAY_RAYLET_PID", "RAY_ADDRESS"}
    assert read - set_by_ray <= set(first_cells(section("## Environment variables")))


def test_links_lead_somewhere():
    for page in [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
