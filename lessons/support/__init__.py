"""What only the lessons need: parameters, figures, tables, claims, controls, toy data, exercise checks.

Importing this loads no torch and draws nothing. A lesson imports it before torch, because of what comes first here.
"""

import os

# Torch's threads spin while they wait for each other. With steps as small as ours, on a computer that is busy with
# something else, that made a lesson 20 times slower (106 s against 5 s, two cores); sleeping costs nothing here.
# The OpenMP library reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from .doctor import as_log, doctor
from .figures import draw, mark_skips, show, style
from .knobs import knob
from .params import fraction, lesson_args, whole, whole_list
from .report import about, claim, finish, not_shown, say, table

__all__ = [
    "about",
    "as_log",
    "claim",
    "doctor",
    "draw",
    "finish",
    "fraction",
    "knob",
    "lesson_args",
    "mark_skips",
    "not_shown",
    "say",
    "show",
    "style",
    "table",
    "whole",
    "whole_list",
]
