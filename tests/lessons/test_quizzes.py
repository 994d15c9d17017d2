"""Each quiz can be answered only by thinking: one right option, in no fixed place, and not by its length."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jupytext
import pytest

QUESTION = re.compile(r"^\*\*\d+\. .+\*\*$", re.MULTILINE)
OPTION = re.compile(
    r"<details><summary>(?P<letter>[A-E])\. (?P<text>[^<]+)</summary>\n\n(?P<answer>.+?)\n\n</details>", re.DOTALL
)


@dataclass
class Option:
    letter: str
    text: str
    answer: str

    @property
    def right(self) -> bool:
        return self.answer.startswith("Right. ")


def questions_of(script: Path) -> list[list[Option]]:
    if script.stem == "00_start_here":
        pytest.skip("the entrance has no quiz")
    cells = jupytext.read(script, fmt="py:percent").cells
    markdown = [cell.source for cell in cells if cell.cell_type == "markdown"]
    return [
        [Option(m["letter"], m["text"], m["answer"]) for m in OPTION.finditer(source)]
        for source in markdown
        if QUESTION.search(source)
    ]


def test_a_quiz_has_three_to_five_questions_with_lettered_options(script: Path) -> None:
    questions = questions_of(script)
    assert 3 <= len(questions) <= 5
    for options in questions:
        assert 3 <= len(options) <= 5
        assert [o.letter for o in options] == list("ABCDE")[: len(options)]


def test_one_option_is_right_and_every_other_is_explained(script: Path) -> None:
    for options in questions_of(script):
        assert sum(o.right for o in options) == 1
        for option in options:
            assert option.right or option.answer.startswith("No. ")
            assert len(option.answer.split()) > 8, f"no explanation: {option.answer}"


def test_the_right_place_varies(script: Path) -> None:
    places = [next(o.letter for o in options if o.right) for options in questions_of(script)]
    assert len(set(places)) >= min(3, len(places))


def test_length_does_not_give_the_right_option_away(script: Path) -> None:
    questions = questions_of(script)
    longest = sum(max(options, key=lambda o: len(o.text)).right for options in questions)
    assert longest <= len(questions) / 2
    for options in questions:
        lengths = [len(o.text) for o in options]
        assert max(lengths) <= 1.5 * min(lengths), f"{[o.text for o in options]}"
