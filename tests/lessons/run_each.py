"""Run a lesson in one process once for each command line: ``python run_each.py LESSON.py JSON``, a list of lists.

It is meant for starts that end before the lesson begins, as for ``--help`` or a bad flag. Prints a JSON list of what
each start ended with, as a process of its own would.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback


def started(script: str, flags: list[str]) -> dict[str, object]:
    """Exit status, both outputs, and the names of what now lies in the working directory."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    sys.argv = [script, *flags]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except Exception:  # noqa: BLE001 -- a process ends so, whatever was raised
            status = 1
            traceback.print_exc()
    return {"status": status, "stdout": out.getvalue(), "stderr": err.getvalue(), "left": os.listdir()}


if __name__ == "__main__":
    lesson, argvs = sys.argv[1:]
    sys.path[0] = os.path.dirname(lesson)  # as Python does for a script
    print(json.dumps([started(lesson, flags) for flags in json.loads(argvs)]))
