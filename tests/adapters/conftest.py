"""Helpers that need a library, or are started as scripts, are no tests; and nothing here may ask the network."""

import os

collect_ignore = ["hf_runs.py", "lightning_runs.py", "on_two_ranks.py"]

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_OFFLINE="1", DO_NOT_TRACK="1")
