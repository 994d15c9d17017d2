"""A learner's way through each lesson in JupyterLab, with a real browser: ``make browser``."""

from __future__ import annotations

import ast
import re

import pytest
from exercises import solution_of

#: For each lesson's first exercise a slip of the pen: (what its solution says, what is typed instead, what the check
#: then explains).
SLIPS = {
    "01_clipping_amp": ("if norm > max_norm:", "if True:", "a gradient of norm 0.5 was made larger"),
    "02_accumulation": ("int((y != -100).sum())", "y.numel()", "you counted padding too"),
    "03_checkpoint_resume": (
        "sorted(losses, key=lambda name: int(name[5:-3]))",
        "sorted(losses)",
        "order by the number",
    ),
    "04_sharded_resume": (".clone()", "", "is a view of"),
    "05_gradient_checkpointing": ("-(-layers // k)", "layers / k", "a shorter segment has a boundary too"),
    "06_thermal_guard": ("if unknown >= 3", "if unknown > 3", "a third unknown in a row is a lost sensor"),
    "07_low_rank_gradients": ("2 * m * n", "m * rank + 2 * rank * n", "not above this rank"),
    "08_distributed_run": (
        "max(0, min(most, rows - most * rank))",
        "most",
        "the last of them gets the one row that is left",
    ),
}
ENTRANCE = "00_start_here"

#: A picture's own width, and where it and its cell end in the page, in pixels.
SIZES = """(picture) => {
  const edge = (element) => element.getBoundingClientRect().right;
  return [picture.naturalWidth, edge(picture), edge(picture.closest('.jp-Cell'))];
}"""

#: Whether an element has more text than room.
CUT = "(element) => element.scrollWidth > element.clientWidth"


def with_answer(stub: str, answer: str) -> str:
    """The exercise's cell with its functions replaced by ``answer``; imports and the call of the check stay."""
    lines = stub.splitlines()
    first = None
    for node in reversed(ast.parse(stub).body):
        if isinstance(node, ast.FunctionDef):
            first = min(node.lineno, *(decorator.lineno for decorator in node.decorator_list), node.lineno) - 1
            del lines[first : node.end_lineno]
    lines[first:first] = answer.strip().splitlines()
    return "\n".join(lines)


def test_every_cell_runs_and_neither_cells_nor_console_complain(learner):
    assert not learner.complaints
    last = learner.cells()[-1]
    assert "Every claim of this lesson held." in last.text, f"{learner.lesson}, {last} printed {last.text!r}"


def test_every_picture_is_seen_whole_and_says_in_words_what_it_shows(learner):
    pictures = 0
    for cell in learner.cells():
        for picture in learner.element(cell).locator("img").all():
            pictures += 1
            learner.shot(f"picture-{pictures}", picture)
            alt = picture.get_attribute("alt") or ""
            assert len(alt.split()) > 5, f"{learner.lesson}, {cell}: the alt text {alt!r} cannot replace the picture"
            drawn, right, edge = picture.evaluate(SIZES)
            assert drawn > 100, f"{learner.lesson}, {cell}: picture {pictures} is not drawn"
            assert right <= edge, f"{learner.lesson}, {cell}: picture {pictures} ends {right - edge:.0f} px outside"
    assert pictures, f"{learner.lesson} has no picture"


def test_each_control_has_a_label_and_draws_its_picture_anew(learner):
    moved = 0
    for cell in learner.cells():
        if not cell.has_widget:
            continue
        output = learner.element(cell).locator(".jp-OutputArea")
        output.locator(".jupyter-widgets").first.wait_for()
        picture = output.locator(".widget-html img")
        for slider in output.locator(".widget-slider").all():
            label = slider.locator(".widget-label").text_content() or ""
            assert label.strip(), f"{learner.lesson}, {cell}: a slider has no label"
            assert not slider.locator(".widget-label").evaluate(CUT), f"{learner.lesson}, {cell}: {label!r} is cut off"
            assert learner.move(slider, picture), f"{learner.lesson}, {cell}: moving {label!r} changes no picture"
            moved += 1
        learner.shot(f"control-{cell.number + 1}", output)
    assert moved or learner.lesson == ENTRANCE, f"{learner.lesson} has no slider to move"


def test_a_symptom_breaks_and_is_mended_at_the_press_of_a_button(learner):
    if learner.lesson != ENTRANCE:
        pytest.skip("only the entrance has buttons")
    (cell,) = [cell for cell in learner.cells() if "Break it" in cell.source and cell.has_widget]
    output = learner.element(cell).locator(".jp-OutputArea")
    page = output.locator(".widget-html-content")
    for number, finding in ((3, "scale_never_moves"), (9, "world_size_mismatch")):
        output.locator("select").select_option(index=number - 1)
        found = learner.press(output.get_by_role("button", name="Break it"), page)
        learner.shot(f"symptom-{number}", output)
        assert finding in found, f"{learner.lesson}, {cell}: symptom {number} shows {found!r}"
        found = learner.press(output.get_by_role("button", name="Mend it"), page)
        assert "nothing found" in found.lower(), f"{learner.lesson}, {cell}: symptom {number}, mended, shows {found!r}"


def test_each_exercise_says_not_yet_and_then_right(learner, passed):
    cells = learner.cells()
    exercises = [cell for cell in cells if "exercise" in cell.tags]
    assert exercises or learner.lesson == ENTRANCE, f"{learner.lesson} has no exercise"
    for number, cell in enumerate(exercises):
        where = f"{learner.lesson}, {cell}"
        assert cell.text.startswith("Not yet: "), f"{where}: the stub got {cell.text!r}"
        solution = solution_of(cells[cell.number + 1].source)
        if number == 0:
            right, wrong, explained = SLIPS[learner.lesson]
            assert right in solution, f"{where}: {right!r} is no longer in the solution; choose another slip"
            said = learner.answer(cell, with_answer(cell.source, solution.replace(right, wrong)))
            learner.shot("exercise-wrong", learner.element(cell))
            assert said.startswith("Not yet: "), f"{where}: a wrong answer got {said!r}"
            assert explained in " ".join(said.split()), f"{where}: {explained!r} is not in {said!r}"
        said = learner.answer(cell, with_answer(cell.source, solution))
        learner.shot(f"exercise-{number + 1}-right", learner.element(cell))
        assert said.startswith("Right: "), f"{where}: the solution got {said!r}"
        assert " ".join(said.split()) in " ".join(learner.element(cell).inner_text().split()), f"{where}: not in sight"
        passed.append(where)


def test_the_entrance_tells_how_many_exercises_were_passed(learner, passed):
    if learner.lesson != ENTRANCE:
        pytest.skip("only the entrance tells it")
    told = [
        int(number) for cell in learner.cells() for number in re.findall(r"(\d+) of \d+ exercises passed", cell.text)
    ]
    assert sum(told) == len(passed), f"{learner.lesson} tells {told}; passed were {passed}"


def test_hints_solutions_and_quiz_unfold(learner):
    unfolded = 0
    for cell in learner.cells():
        for fold in learner.element(cell).locator("details").all():
            summary = fold.locator("summary")
            title = summary.text_content()
            closed = fold.bounding_box()["height"]
            summary.click()
            opened = fold.bounding_box()["height"]
            assert opened > closed + 10, f"{learner.lesson}, {cell}: {title!r} does not unfold"
            unfolded += 1
        if unfolded and "## 8. Quiz" in cell.source:
            learner.shot("quiz", learner.element(cell))
    assert unfolded or learner.lesson == ENTRANCE, f"{learner.lesson} has nothing to unfold"


def test_previous_and_next_name_the_neighbours_and_a_click_opens_one(learner, lessons):
    here = lessons.index(learner.lesson)
    first = learner.cells()[0].source
    links = dict(re.findall(r"(Previous|Next): \[[^\]]+\]\(([^)]+)\.ipynb\)", first))
    neighbours = {"Previous": lessons[here - 1]} if here else {}
    neighbours |= {"Next": lessons[here + 1]} if here + 1 < len(lessons) else {}
    assert links == neighbours, f"{learner.lesson}: the first cell links {links}"
    way = "Next" if "Next" in links else "Previous"
    (title,) = re.findall(rf"{way}: \[([^\]]+)\]", first)
    assert learner.follow(title) == f"{links[way]}.ipynb"
