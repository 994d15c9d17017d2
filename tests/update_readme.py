"""Rewrite the generated parts of the README: ``make readme``."""

import re
from pathlib import Path

from quoted import BEGIN, END, measured_block, with_present_figures
from results import read

from safetrain_core.config import reference_table


def main() -> None:
    path = Path(__file__).parents[1] / "README.md"
    text = path.read_text(encoding="utf-8")
    block = f"<!-- config table: made by `make readme` -->\n{reference_table()}\n<!-- end of config table -->"
    pattern = r"<!-- config table.*?end of config table -->"
    text, found = re.subn(pattern, lambda _: block, text, flags=re.DOTALL)
    if found != 1:
        raise SystemExit(f"README.md has {found} places for the config table; it must have one")
    text = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: measured_block(), text, flags=re.DOTALL)
    path.write_text(with_present_figures(text, read()), encoding="utf-8")


if __name__ == "__main__":
    main()
