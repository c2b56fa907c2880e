"""Whether this Python can run the examples for GPUs: verl, vLLM and the plugin of this clone, in range.

    python examples/check_python.py

Silent and 0 if it can; else 2, and what was found, what was expected and what to do.
"""

import re
import sys
from importlib import metadata, util
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Environments that uv made have no pip.
PIP = f"{sys.executable} -m pip install" if util.find_spec("pip") else f"uv pip install --python {sys.executable}"
INSTALL = f"Install it: {PIP} {REPOSITORY}"
ENVIRONMENT = f"Install one, {PIP} ..., or take the locked environment: VERL_USE_UV=1"


def installed(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def problem() -> tuple[str, str, str, str] | None:
    """What is wrong, what was found, what was expected, what to do; None if all is well."""
    # Read, not imported: the clone's version, whatever is installed.
    version = re.search(r'__version__ = "(.+)"', (REPOSITORY / "src" / "verl_otb" / "__init__.py").read_text())[1]
    if installed("verl-otb") != f"verl-otb {version}" or util.find_spec("verl_otb") is None:
        return "the plugin is not this clone's", installed("verl-otb"), f"verl-otb {version}", INSTALL
    points = metadata.entry_points(group="verl.plugins")
    if not any(point.value == "verl_otb.plugin" for point in points):
        found = ", ".join(point.name for point in points) or "none"
        return "verl does not see the plugin", f"entry points of verl.plugins: {found}", "otb", INSTALL

    from packaging.specifiers import SpecifierSet

    from verl_otb.integration.hook import SUPPORTED

    verl = installed("verl").split()[-1]
    if util.find_spec("verl") is None or not SpecifierSet(SUPPORTED).contains(verl, prereleases=True):
        return "verl is not one that the plugin fits", installed("verl"), f"verl {SUPPORTED}", ENVIRONMENT
    if util.find_spec("vllm") is None:
        return "the rollout engine is missing", "no vllm", "vllm", ENVIRONMENT
    return None


if __name__ == "__main__" and (lines := problem()):
    what, found, expected, do = lines
    print(f"{sys.executable}: {what}\n  found     {found}\n  expected  {expected}\n  {do}", file=sys.stderr)
    sys.exit(2)
