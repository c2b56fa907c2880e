"""Loaded into a run by VERL_USE_EXTERNAL_MODULES: every process writes down which Python it is."""

import os
import sys
from pathlib import Path

directory = Path(os.environ["OTB_PROBE_DIR"])
directory.mkdir(parents=True, exist_ok=True)
(directory / f"python_of_{os.getpid()}").write_text(sys.executable)
