"""Entry point `otb_cpu` of the group `verl.plugins`: runs verl without accelerators if `VERL_PLATFORM=cpu`.

verl imports this module in the driver, in every Ray actor and in the vLLM workers, and never calls it. Without
the variable the import does nothing at all.
"""

import os


def activate() -> None:
    """Register the platform and install the repairs in this process.

    Raises:
        SystemExit: if that fails. verl swallows every Exception of a plugin, and would go on to say no more than
            "Unknown platform 'cpu'".
    """
    # verl registers its FSDP engines for "cuda" and "npu"; the one for "cuda" is plain torch and runs anywhere.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    # vLLM would pin its threads to cores and reserve one of them; Ray's actors share the few there are.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # The vLLM worker stays within vLLM's engine process: one process less to start.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # Ray kills workers when the machine's memory passes 95 %, whoever uses it.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    try:
        from verl_otb.cpu import platform, repairs

        platform.register()
        repairs.install()
    except Exception as error:
        raise SystemExit(f"verl_otb.cpu: VERL_PLATFORM=cpu cannot be set up: {error!r}") from error


# verl reads the variable in the same way.
if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    activate()
