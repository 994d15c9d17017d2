"""The lessons and the symptoms, once: links, the lesson list and the symptom table are made from this page.

A lesson's Markdown holds them between marks such as ``<!-- nav -->`` and ``<!-- /nav -->``;
``tests/lessons/build_notebooks.py`` writes what is between, and a test checks that it is up to date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Lesson:
    """A lesson: its file name without the ending, title, minutes for the learner, and its question."""

    name: str
    title: str
    minutes: int
    question: str

    @property
    def number(self) -> str:
        return self.name[:2]


LESSONS = (
    Lesson(
        "00_start_here",
        "Start here",
        15,
        "What breaks in training, and where do you see it fixed?",
    ),
    Lesson(
        "01_clipping_amp",
        "Clipping and mixed precision",
        35,
        "How does one bad step end a run, and what stops it?",
    ),
    Lesson(
        "02_accumulation",
        "Gradient accumulation",
        30,
        "When do K small batches equal a large one?",
    ),
    Lesson(
        "03_checkpoint_resume",
        "Checkpoint and resume",
        30,
        "Is the resumed run the same run?",
    ),
    Lesson(
        "04_sharded_resume",
        "Sharded checkpoints",
        30,
        "Which of many files can you trust after a crash?",
    ),
    Lesson(
        "05_gradient_checkpointing",
        "Gradient checkpointing",
        30,
        "What does memory cost in recomputation?",
    ),
    Lesson(
        "06_thermal_guard",
        "Thermal guard",
        25,
        "What should training do when the device runs hot?",
    ),
    Lesson(
        "07_low_rank_gradients",
        "Low-rank gradients",
        30,
        "How small can optimizer state get?",
    ),
    Lesson(
        "08_distributed_run",
        "The whole run, on four ranks",
        35,
        "Do all the guards hold together?",
    ),
)


@dataclass(frozen=True)
class Symptom:
    """What is seen, why, what fixes it, and the lesson that breaks and fixes it; ``also`` shows it in another form."""

    seen: str
    cause: str
    fix: str
    lesson: str
    also: str = ""


TRAINING = (
    Symptom(
        "One batch, and the loss shoots up and stays up",
        "that batch's gradient norm was hundreds of times the usual one, and nothing held it back",
        "clip the global norm, at 1.0 to begin with",
        "01_clipping_amp",
    ),
    Symptom(
        "After one step every weight is NaN",
        "a gradient left float16's range: Inf, then Inf / Inf",
        "a `GradScaler`, which leaves that step out",
        "01_clipping_amp",
    ),
    Symptom(
        "The scaling factor is the same number in every row",
        "the path that skips a step never reaches `scaler.update()`",
        "end every window in `update()`, skipped or not",
        "01_clipping_amp",
    ),
    Symptom(
        "The logged norm is in the thousands and follows the scaling factor",
        "the clip sees gradients that are still multiplied by it",
        "`scaler.unscale_(optimizer)`, then the norm and the clip",
        "01_clipping_amp",
    ),
    Symptom(
        "SKIP rows by the hundred in each epoch",
        "the values themselves do not fit float16; no factor can help",
        "an alert above 5 % skipped; then better units, or bfloat16",
        "01_clipping_amp",
    ),
    Symptom(
        "Accumulating over K micro-batches makes steps K times too large",
        "each micro-batch's loss was used whole",
        "divide each loss by K",
        "02_accumulation",
    ),
    Symptom(
        "The loss curve after a resume is not the one before it",
        "the random number generators started afresh",
        "save their state, and restore it last",
        "03_checkpoint_resume",
        also="08_distributed_run",
    ),
    Symptom(
        "Out of memory in the forward pass, though the weights fit",
        "every layer's activations wait for the backward pass",
        "keep few of them and compute the rest again",
        "05_gradient_checkpointing",
    ),
)

LOADING = (
    Symptom(
        "`world_size mismatch`",
        "saved on another number of ranks than it is loaded on",
        "load on the same number, or reshard on purpose",
        "04_sharded_resume",
    ),
    Symptom(
        "`sha256 mismatch on rank`",
        "the save was cut off, and part of a shard is missing",
        "write to a temporary file, fsync, rename",
        "04_sharded_resume",
    ),
    Symptom(
        "`shard file missing`",
        "the manifest lists more shards than the folder holds",
        "look for each listed file before reading any",
        "04_sharded_resume",
    ),
    Symptom(
        "`unknown schema`",
        "the payload's schema name does not begin with ckpt",
        "migrate older layouts by their schema name",
        "04_sharded_resume",
        also="03_checkpoint_resume",
    ),
    Symptom(
        "A resume looks well, and a hundred steps later the loss is NaN",
        "a shard is incomplete, but the manifest beside it says nothing of that",
        "atomic writes, and a checksum for each shard on load",
        "04_sharded_resume",
        also="03_checkpoint_resume",
    ),
    Symptom(
        "The disk is full in the middle of the run",
        "each save added a checkpoint and none was ever removed",
        "keep the last few with `rotate_checkpoints`",
        "04_sharded_resume",
        also="03_checkpoint_resume",
    ),
)

SYMPTOMS = TRAINING + LOADING


def exists(name: str) -> bool:
    """Whether lesson ``name`` has been written."""
    return (FOLDER / f"{name}.py").is_file()


def link(name: str, text: str | None = None) -> str:
    """A link to a lesson's notebook, or plain words where it is still to come.

    >>> link("01_clipping_amp", "lesson 01")
    '[lesson 01](01_clipping_amp.ipynb)'
    """
    text = text or f"lesson {name[:2]}"
    return f"[{text}]({name}.ipynb)" if exists(name) else f"{text} (coming)"


def nav(name: str) -> str:
    """Previous and next.

    >>> nav("99_new")
    Traceback (most recent call last):
    ...
    ValueError: 99_new is not among LESSONS in lessons/support/index.py; add it there
    """
    names = [lesson.name for lesson in LESSONS]
    if name not in names:
        raise ValueError(
            f"{name} is not among LESSONS in lessons/support/index.py; add it there"
        )
    here = names.index(name)
    parts = []
    if here > 0:
        parts.append(f"Previous: {link(names[here - 1], LESSONS[here - 1].title)}")
    if here + 1 < len(names):
        parts.append(f"Next: {link(names[here + 1], LESSONS[here + 1].title)}")
    return " · ".join(parts)


def lesson_list(name: str) -> str:
    """A table of all lessons with their minutes."""
    rows = [
        f"| {lesson.number} | {link(lesson.name, lesson.title)} | {lesson.question} | {lesson.minutes} |"
        for lesson in LESSONS
        if lesson.name != name
    ]
    return "\n".join(["| | Lesson | Question | Minutes |", "|---|---|---|---|", *rows])


def symptom_table(symptoms: tuple[Symptom, ...]) -> str:
    """What you see, why, what fixes it, where."""
    rows = [
        f"| {SYMPTOMS.index(s) + 1} | {s.seen} | {s.cause} | {s.fix} | "
        f"{', '.join(link(name) for name in sorted({s.also, s.lesson} - {''}))} |"
        for s in symptoms
    ]
    return "\n".join(
        [
            "| | You see | Because | Fix | Broken and fixed in |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def settles(name: str) -> str:
    """The symptoms that a lesson settles, by number."""
    lines = [
        f"- **{number}.** {s.seen}"
        for number, s in enumerate(SYMPTOMS, start=1)
        if name in (s.lesson, s.also)
    ]
    if not lines:
        return (
            f"It settles none of the symptoms in {link('00_start_here', 'lesson 00')}: what it is about shows "
            "neither in a loss nor in a file."
        )
    return "\n".join(
        [
            f"Of the symptoms in {link('00_start_here', 'lesson 00')}, this settles",
            "",
            *lines,
        ]
    )


MADE = {
    "nav": nav,
    "lessons": lesson_list,
    "settles": settles,
    "training": lambda _: symptom_table(TRAINING),
    "loading": lambda _: symptom_table(LOADING),
}


def refresh(script: str, name: str) -> str:
    """The text of ``name.py`` with everything between marks written anew.

    >>> print(refresh("# <!-- nav -->\\n# old\\n# <!-- /nav -->", "00_start_here").splitlines()[2][:6])
    # Next
    """

    def written(match: re.Match[str]) -> str:
        lines = ["", *MADE[match["kind"]](name).splitlines(), ""]
        body = "\n".join(f"# {line}".rstrip() for line in lines)
        return f"# <!-- {match['kind']} -->\n{body}\n# <!-- /{match['kind']} -->"

    kinds = "|".join(MADE)
    return re.sub(
        rf"# <!-- (?P<kind>{kinds}) -->\n.*?# <!-- /(?P=kind) -->",
        written,
        script,
        flags=re.DOTALL,
    )
