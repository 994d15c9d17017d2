"""Rewrite constraints.txt from what is installed: ``make pins``, after an upgrade that was tried."""

import re
import subprocess
import sys
from pathlib import Path

HEADER = "# Exact versions that the kit is tested with; made by `make pins`.\n"
SECOND = "# What only `make test-adapters` installs besides.\n"


def frozen(python: str) -> dict[str, str]:
    """Name in lower case -> the line of ``pip freeze``; a local build tag such as +cpu names the machine's build."""
    told = subprocess.run(
        [python, "-m", "pip", "freeze", "--exclude-editable"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    lines = [re.sub(r"\+[\w.]+$", "", line) for line in told if re.fullmatch(r"[\w.-]+==[\w.+!-]+", line)]
    return {name_of(line): line for line in lines}


def name_of(line: str) -> str:
    return re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()


def main() -> None:
    path = Path(__file__).parents[1] / "constraints.txt"
    first = frozen(sys.executable)
    adapters = sys.argv[1] if len(sys.argv) > 1 else ""
    if Path(adapters).is_file():
        both = frozen(adapters)
        differ = [f"{first[name]} and {both[name]}" for name in first if name in both and first[name] != both[name]]
        if differ:
            raise SystemExit(f"the two environments differ in {'; '.join(differ)}: remove the older one and set it up")
    else:  # that environment is not here: its pins stay
        kept = path.read_text(encoding="utf-8").partition(SECOND)[2].splitlines()
        both = {name_of(line): line for line in kept}
    second = [line for name, line in both.items() if name not in first]
    path.write_text(HEADER + "\n".join(first.values()) + "\n" + SECOND + "\n".join(second) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(first)} pins, and {len(second)} of the adapters' environment")


if __name__ == "__main__":
    main()
