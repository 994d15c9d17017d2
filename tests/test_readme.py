"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from update_readme import PICTURE, rewritten

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_snippets_run_in_order_and_print_what_they_say(tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(snippets) == 3
    done = subprocess.run([sys.executable, "-c", "\n".join(snippets)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("STEP step=  1 lr=0.010000 pre_clip=")
    assert last == "completed 6 0.0"


def test_the_commands_of_the_command_line_section_are_accepted(tmp_path):
    commands = re.findall(r"^safetrain (train .*?)(?:  +#.*)?$", README, flags=re.MULTILINE)
    assert len(commands) == 5
    (tmp_path / "my.txt").write_text("some text " * 200)
    (tmp_path / "run.yaml").write_text("batch_size: 4\n")
    for command in commands:
        argv = [sys.executable, "-m", "safetrain_core", *command.split(), "--print-config"]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_each_relative_link_leads_to_a_file(link):
    assert (ROOT / link).exists()


def test_the_generated_parts_are_up_to_date():
    assert rewritten(README) == README, "run `make readme`"
    with pytest.raises(ValueError, match="0 places for the lessons"):
        rewritten(README.replace("<!-- lessons: ", "<!-- "))


def test_the_picture_is_small_and_its_text_says_what_it_shows():
    alt, target = re.search(r"!\[([^\]]+)\]\(([^)]+)\)", README).groups()
    assert (ROOT / target).resolve() == PICTURE.resolve()
    assert PICTURE.read_bytes()[:4] == b"\x89PNG"
    assert PICTURE.stat().st_size < 50_000
    assert "NaN" in alt
    assert "SKIP" in alt


def test_each_make_target_named_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
