"""Loaded into a run by VERL_USE_EXTERNAL_MODULES: every process writes down which verl it has."""

import os
from pathlib import Path

import verl

directory = Path(os.environ["OTB_PROBE_DIR"])
directory.mkdir(parents=True, exist_ok=True)
(directory / f"verl_of_{os.getpid()}").write_text(verl.__version__)
