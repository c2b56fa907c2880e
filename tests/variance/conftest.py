"""These tests hold benchmarks/variance to the theory; its modules import each other as its scripts find them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "variance"))
