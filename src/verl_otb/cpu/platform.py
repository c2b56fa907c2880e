"""The platform "cpu" for verl's PlatformRegistry."""

import os
import resource
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class CpuDeviceModule(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls on its device module and `torch.cpu` lacks.

    Memory figures are those of the process: resident now, and at its peak, in bytes.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def memory_allocated(self, device: Any = None) -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    def max_memory_allocated(self, device: Any = None) -> int:
        # The kernel brings its peak up to date now and then only.
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self.memory_allocated())

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        page = resource.getpagesize()
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """There is no device memory to manage."""

    empty_cache = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = _nothing


class CpuPlatform(PlatformBase):
    """A machine without accelerators. Never chosen by itself, only by `VERL_PLATFORM=cpu`."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDeviceModule("verl_otb.cpu.device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:  # type: ignore[override]
        # verl's type says int, but `tensor.to(0)` would mean the accelerator that torch was built for.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        # Logical: Ray counts the GPUs that it was told, and verl asks for one a rank (see ray_resources.py).
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        # Weights then go to vLLM through POSIX shared memory.
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """The host is always the current device, always in step, and has no device memory or device profiler."""

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing


def register() -> None:
    """Register the platform under the name that `VERL_PLATFORM=cpu` asks for."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
