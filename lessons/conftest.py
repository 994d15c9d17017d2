"""The numbered scripts are lessons, not modules: pytest runs their notebooks, and tests/lessons the scripts."""

collect_ignore_glob = ["[0-9]*.py", "runs"]
