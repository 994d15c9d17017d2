"""A script and its notebook are one lesson, and the notebook reads well without a kernel."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
import pytest

MARKDOWN_IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\(")


def notebook_of(script: Path) -> nbformat.NotebookNode:
    path = script.with_suffix(".ipynb")
    assert path.is_file(), f"{path.name} is missing: make notebooks"
    return nbformat.read(path, as_version=4)


def outputs_of(script: Path) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook_of(script).cells for output in cell.get("outputs", [])]


def test_each_notebook_holds_the_cells_of_its_script(script: Path) -> None:
    def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str, list[str]]]:
        return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook.cells]

    written, stored = cells(jupytext.read(script, fmt="py:percent")), cells(notebook_of(script))
    for number, (left, right) in enumerate(zip(written, stored, strict=False)):
        assert left == right, (
            f"cell {number} differs from its script: put an answer of yours aside (git stash), else make notebooks"
        )
    assert len(written) == len(stored)


def test_each_notebook_has_its_script(lessons_folder: Path) -> None:
    for notebook in lessons_folder.glob("*.ipynb"):
        assert notebook.with_suffix(".py").is_file()


def test_the_exercises_of_each_lesson_are_proved(script: Path) -> None:
    exercises = '# %% tags=["exercise"]' in script.read_text(encoding="utf-8")
    proved = (Path(__file__).parent / f"test_exercises_{script.stem[:2]}.py").is_file()
    assert exercises == proved == (script.stem != "00_start_here")


def test_each_notebook_names_the_kernel_that_jupyter_looks_for(script: Path) -> None:
    metadata = notebook_of(script).metadata
    assert metadata.kernelspec.name == "python3"
    assert set(metadata) == {"kernelspec", "language_info"}


def test_each_notebook_is_stored_with_outputs_and_without_errors(script: Path) -> None:
    outputs = outputs_of(script)
    assert len(outputs) > 5
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]


def test_code_cells_are_numbered_as_in_one_fresh_run(script: Path) -> None:
    counts = [cell.execution_count for cell in notebook_of(script).cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_each_claim_of_a_stored_notebook_held(script: Path) -> None:
    text = "".join(output.get("text", "") for output in outputs_of(script))
    assert "HELD" in text
    assert "FAILED" not in text
    assert "Every claim of this lesson held." in text


def test_pictures_are_png_and_say_in_words_what_they_show(script: Path) -> None:
    pictures = 0
    for output in outputs_of(script):
        data = output.get("data", {})
        assert not {"text/html", "image/svg+xml", "application/vnd.jupyter.widget-view+json"} & set(data)
        if "image/png" in data:
            pictures += 1
            alt = output.metadata["image/png"]["alt"]
            assert len(alt.split()) > 8, f"too short to replace the picture: {alt!r}"
            # JupyterLab shows the Markdown, and it alone gets an alt attribute there.
            assert MARKDOWN_IMAGE.match(data["text/markdown"])["alt"] == alt
    assert pictures > 0


def test_a_stored_notebook_stays_small_and_names_no_place(script: Path) -> None:
    text = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert len(text) < 400_000
    ignored = [c for c in notebook_of(script).cells if "nbval-ignore-output" in c.metadata.get("tags", [])]
    shown = "".join(str(output) for cell in ignored for output in cell.outputs)
    assert not re.search(r"/(home|root|Users|work|tmp)/", shown), "a path of the machine that built it is stored"


@pytest.mark.parametrize("kind", ["notebook", "script"])
def test_relative_links_lead_to_files(script: Path, kind: str) -> None:
    source = notebook_of(script) if kind == "notebook" else jupytext.read(script, fmt="py:percent")
    for cell in source.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)\s]+)\)", cell.source):
                if "://" not in target:
                    assert (script.parent / target.partition("#")[0]).is_file(), f"{target} is not there"


def test_generated_markdown_is_in_step_with_the_lessons_that_exist(script: Path) -> None:
    from support import index

    text = script.read_text(encoding="utf-8")
    assert index.refresh(text, script.stem) == text, "make notebooks"
    assert "<!-- nav -->" in text
    if script.stem != "00_start_here":
        assert "<!-- settles -->" in text


def test_each_lesson_is_in_the_index(script: Path) -> None:
    from support import index

    assert script.stem in [lesson.name for lesson in index.LESSONS]
    assert f"{script.stem.split('_')[0]} · " in jupytext.read(script, fmt="py:percent").cells[0].source


def test_lessons_keep_to_the_order_of_their_parts(script: Path) -> None:
    if script.stem == "00_start_here":
        pytest.skip("the entrance has an order of its own")
    text = script.read_text(encoding="utf-8")
    parts = re.findall(r"^# ## \d+\. (.+)$", text, flags=re.MULTILINE)
    assert parts == [
        "Predict", "Break it", "By hand", "The package", "What it costs",
        "Turn the knob", "Your turn", "Quiz", "Take it home",
    ]  # fmt: skip
    before = text[: text.index("## 1. Predict")]
    assert "You will be able to" in before
    assert "minutes" in before
