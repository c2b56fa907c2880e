"""Loaded by VERL_USE_EXTERNAL_MODULES: where the environment has WITHOUT_OTB, verl-otb is as if not installed.

The tests' nodes share one environment, and the platform for the CPU is in the same package.
"""

import os
import sys

if "WITHOUT_OTB" in os.environ:
    sys.modules["verl_otb.plugin"] = None  # its import is a ModuleNotFoundError
