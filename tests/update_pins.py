"""Rewrite constraints.txt from what is installed: ``make pins``, after an upgrade that was tried."""

import re
import subprocess
import sys
from pathlib import Path

HEADER = "# Exact versions that the kit is tested with; made by `make pins`.\n"


def main() -> None:
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    # A local build tag such as +cpu names the machine's build, not the release.
    lines = [re.sub(r"\+[\w.]+$", "", line) for line in frozen if re.fullmatch(r"[\w.-]+==[\w.+!-]+", line)]
    path = Path(__file__).parents[1] / "constraints.txt"
    path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(lines)} pins")


if __name__ == "__main__":
    main()
