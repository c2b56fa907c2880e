"""Are the Triton kernels right and fast on this GPU? One run, under 3 minutes: torch, Triton and src/ are all it needs.

    python benchmarks/gpu_check.py            # on a GPU; LAUNCH=4,8,4,1 sets num_warps,per_thread,depth,num_stages
    TRITON_INTERPRET=1 python benchmarks/gpu_check.py     # the same steps on a CPU, tiny, timings without meaning

Writes gpu_check.md and gpu_check.csv to $OUT, or to benchmarks/results/.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from verl_otb.kernels import linear, linear_token_statistics, token_statistics, triton_kernels  # noqa: E402
from verl_otb.kernels.partials import join, statistics_of  # noqa: E402
from verl_otb.kernels.triton_kernels import Launch  # noqa: E402

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"
TOKENS, VOCABULARY, WIDTH = ((8_192, 24_576), 151_936, 4_096) if ON_GPU else ((3, 5), 5_000, 16)
CANDIDATES = [  # num_warps, per_thread, depth, num_stages
    Launch(1, 8, 4, 1), Launch(1, 8, 8, 1), Launch(2, 8, 4, 1), Launch(4, 8, 2, 1), Launch(4, 8, 4, 1),
    Launch(8, 8, 1, 1), Launch(8, 8, 2, 1), Launch(8, 8, 4, 1), Launch(4, 8, 2, 3), Launch(8, 8, 2, 3),
]  # fmt: skip
MIB = 1 << 20
if "LAUNCH" in os.environ:
    triton_kernels.DEFAULT = Launch(*map(int, os.environ["LAUNCH"].split(",")))
rows: list[dict[str, str]] = []
failures: list[str] = []


def report(section: str, what: str, **figures: float | str) -> None:
    row = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in figures.items()}
    rows.append({"section": section, "what": what, **row})
    print(f"{section:12} {what:42}", *(f"{key}={value}" for key, value in row.items()), flush=True)


def milliseconds(call: Callable[[], object], repeat_ms: int = 60) -> float:
    """Median of device time."""
    if ON_GPU:
        return float(triton.testing.do_bench(call, warmup=15, rep=repeat_ms, return_mode="median"))
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def extra_mib(call: Callable[[], object]) -> float:
    """Peak of the allocator during the call, over what was held before."""
    if not ON_GPU:
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / MIB


def gigabytes_per_second(tensor: Tensor, ms: float, times: float = 1) -> float:
    return times * tensor.numel() * tensor.element_size() / ms / 1e6


def plain_log_prob_and_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return log_probs, entropy


def plain_three(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sum_pi_squared = ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()
    return *plain_log_prob_and_entropy(logits, labels), sum_pi_squared


def logits_and_labels(tokens: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Flat to peaked, row by row."""
    logits = torch.empty(tokens, vocabulary, device=DEVICE, dtype=dtype).normal_()
    logits *= torch.linspace(0, 8, tokens, device=DEVICE, dtype=dtype)[:, None]
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)
    peaks = torch.linspace(5, 40, tokens, device=DEVICE, dtype=dtype)[:, None]
    logits[::3] = logits[::3].scatter(1, labels[::3, None], peaks[::3])
    return logits, labels


def excess_error(logits: Tensor, labels: Tensor, found: object, temperature: float | Tensor = 1.0) -> float:
    """The largest |ours − truth| − |plain float32 torch − truth| of the three; the budget is 1e-6."""
    stored = logits.float()  # float64 logits are rounded first
    truth = token_statistics(stored.double(), labels, temperature=temperature, impl="reference")
    t = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    plain = plain_three(stored / t, labels)
    worst = 0.0
    for ours, exact, rough in zip(found, truth, plain, strict=True):
        assert not ours.isnan().any(), "a result is NaN: never written, or wrong"
        worst = max(worst, float(((ours - exact).abs() - (rough - exact).abs()).max()))
    return worst


def environment() -> None:
    driver = "none"
    if ON_GPU:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip().replace(",", " driver")
    report(
        "environment", driver, python=sys.version.split()[0], torch=torch.__version__, triton=triton.__version__,
        cuda=str(torch.version.cuda), default=str(tuple(triton_kernels.DEFAULT)),
    )  # fmt: skip


def correctness() -> None:
    """Ragged shapes, every dtype, with a temperature a token, outputs poisoned with NaN first."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    shapes = [(1, 1), (7, 17), (12, 507), (3, 4_097)]
    if ON_GPU:
        shapes += [(252, 507), (5, 32_003), (96, VOCABULARY)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        worst = 0.0
        for shape in shapes:
            logits, labels = logits_and_labels(*shape, dtype)
            temperature = torch.linspace(0.5, 2, shape[0], device=DEVICE)
            for t in (1.0, temperature):
                found = token_statistics(logits, labels, temperature=t, impl="triton")
                worst = max(worst, excess_error(logits, labels, found, t))
            odd = logits[:, :-1].T.contiguous().T if shape[1] > 1 else logits  # columns first
            here = labels.clamp(max=odd.shape[1] - 1)
            worst = max(worst, excess_error(odd, here, token_statistics(odd, here, impl="triton")))
        report("correctness", str(dtype), excess_error=worst, budget="1e-6", ok=worst <= 1e-6)
        assert worst <= 1e-6
    logits, labels = logits_and_labels(8, 9_000, torch.float32)
    logits[1], logits[3, 8_999], logits[5, 2], logits[6, 9:] = -torch.inf, torch.nan, torch.inf, -torch.inf
    nan = [s.isnan().tolist() for s in token_statistics(logits, labels, impl="triton")]
    expected = [i in (1, 3, 5) for i in range(8)]
    report("correctness", "rows of −inf, NaN, +inf alone are NaN", ok=nan == [expected] * 3)
    torch.use_deterministic_algorithms(False)


def no_waiting() -> None:
    logits, labels = logits_and_labels(64, 5_000)
    token_statistics(logits, labels, impl="triton")
    torch.cuda.set_sync_debug_mode("error")
    token_statistics(logits, labels, temperature=0.7, impl="triton")
    torch.cuda.set_sync_debug_mode("default")
    report("host", "no synchronisation in a call", ok=True)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import torch\n"
        "from verl_otb.kernels import token_statistics\n"
        "logits = torch.zeros(4, 100, device='cuda')\n"
        "token_statistics(logits, torch.tensor([0, 1, 100, 3], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    asserted = child.returncode != 0 and "assert" in (child.stdout + child.stderr)
    said = "labels must be in" in (child.stdout + child.stderr)
    report("host", "label out of range is a device-side assertion", ok=asserted, message_shown=said)


def copy_bandwidth() -> float:
    """Bytes read and bytes written, by PyTorch's own device-to-device copy."""
    source = torch.empty(TOKENS[0], VOCABULARY, device=DEVICE, dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    ms = milliseconds(lambda: target.copy_(source))
    bandwidth = gigabytes_per_second(source, ms, 2)
    report("copy", f"{TOKENS[0]} x {VOCABULARY} bfloat16", ms=ms, GB_s=bandwidth)
    return bandwidth


def tune(copy: float) -> Launch:
    logits, labels = logits_and_labels(TOKENS[0], VOCABULARY)
    times = {}
    for launch in dict.fromkeys([triton_kernels.DEFAULT, *CANDIDATES]):
        try:
            ms = milliseconds(lambda launch=launch: triton_kernels.partials(logits, labels, 0, None, launch), 30)
            excess = excess_error(
                logits[::128], labels[::128],
                statistics_of(join(triton_kernels.partials(logits, labels, 0, None, launch)[:, ::128])),
            )  # fmt: skip
        except Exception as error:
            report("tune", str(tuple(launch)), error=f"{type(error).__name__}: {error}"[:200])
            continue
        bandwidth = gigabytes_per_second(logits, ms)
        report("tune", str(tuple(launch)), ms=ms, GB_s=bandwidth, of_copy=bandwidth / copy, excess_error=excess)
        times[launch] = ms
    best = min(times, key=times.__getitem__)
    report("tune", f"best {tuple(best)}", ms=times[best])
    for count in (512, 64, 1):
        some, here = logits[:count], labels[:count]
        ms = milliseconds(lambda some=some, here=here: triton_kernels.partials(some, here, 0, None, best), 20)
        report("tune", f"best, {count} rows", ms=ms, GB_s=gigabytes_per_second(some, ms))
    some = logits.float()
    ms = milliseconds(lambda: triton_kernels.partials(some, labels, 0, None, best), 20)
    report("tune", "best, float32 logits", ms=ms, of_copy=gigabytes_per_second(some, ms) / copy)
    t = torch.full_like(labels, 1, dtype=torch.float32)
    ms = milliseconds(lambda: triton_kernels.partials(logits, labels, 0, t, best), 20)
    report("tune", "best, with a temperature a token", ms=ms, of_copy=gigabytes_per_second(logits, ms) / copy)
    return best


def from_logits(tokens: int, copy: float) -> None:
    logits, labels = logits_and_labels(tokens, VOCABULARY)
    found = token_statistics(logits, labels, impl="triton")
    step = max(1, tokens // 64)
    excess = excess_error(logits[::step], labels[::step], [statistic[::step] for statistic in found])

    def under_autocast(call: Callable[[Tensor, Tensor], object]) -> Callable[[], object]:
        def wrapped() -> object:
            with torch.autocast(DEVICE, torch.bfloat16):  # as verl's engine calls its own
                return call(logits, labels)

        return wrapped

    calls: dict[str, Callable[[], object]] = {
        "token_statistics, Triton": lambda: token_statistics(logits, labels, impl="triton"),
        "the kernel alone": lambda: triton_kernels.partials(logits, labels, 0, None),
        "token_statistics, torch": lambda: token_statistics(logits, labels, impl="torch"),
        "plain torch's three, autocast": under_autocast(plain_three),
        "plain log-prob + entropy, autocast": under_autocast(plain_log_prob_and_entropy),
    }
    ours = None
    for name, call in calls.items():
        ms = milliseconds(call)
        ours = ours or ms
        bandwidth = gigabytes_per_second(logits, ms)
        report(
            "from logits", f"{name}, {tokens} x {VOCABULARY}", ms=ms, GB_s=bandwidth, of_copy=bandwidth / copy,
            times_ours=ms / ours, extra_MiB=extra_mib(call), **({"excess_error": excess} if ours == ms else {}),
        )  # fmt: skip


def from_hidden() -> None:
    tokens = TOKENS[0]
    hidden = torch.empty(tokens, WIDTH, device=DEVICE, dtype=torch.bfloat16).normal_()
    weight = torch.empty(VOCABULARY, WIDTH, device=DEVICE, dtype=torch.bfloat16).normal_(std=3 / WIDTH**0.5)
    labels = torch.randint(VOCABULARY, (tokens,), device=DEVICE)

    def bare(rows: int) -> Callable[[], object]:
        def call() -> None:
            columns = linear.CHUNK_ON_DEVICE // 2 // rows
            for left in range(0, VOCABULARY, columns):
                for top in range(0, tokens, rows):
                    torch.nn.functional.linear(hidden[top : top + rows], weight[left : left + columns])

        return call

    def whole() -> object:
        return token_statistics(torch.nn.functional.linear(hidden, weight), labels, impl="triton")

    shape = f"{tokens} x {WIDTH} x {VOCABULARY}"
    product = milliseconds(lambda: torch.nn.functional.linear(hidden, weight), 100)
    flops = 2 * tokens * WIDTH * VOCABULARY
    report("from hidden", f"bare product, whole, {shape}", ms=product, TFLOP_s=flops / product / 1e9)
    default = linear.ROWS_ON_DEVICE
    for height in (8_192, 4_096, 2_048):
        linear.ROWS_ON_DEVICE = height
        call = lambda: linear_token_statistics(hidden, weight, labels, impl="triton")  # noqa: E731
        chunked = milliseconds(bare(min(height, tokens)), 100)
        ms = milliseconds(call, 100)
        report(
            "from hidden", f"linear_token_statistics, chunks of {height} rows", ms=ms, bare_in_chunks_ms=chunked,
            of_bare_in_chunks=ms / chunked, of_whole_product=ms / product, extra_MiB=extra_mib(call),
        )  # fmt: skip
    linear.ROWS_ON_DEVICE = default
    ms = milliseconds(whole, 100)
    report("from hidden", "whole logits, then token_statistics", ms=ms, extra_MiB=extra_mib(whole))
    found = linear_token_statistics(hidden[:64], weight, labels[:64], impl="triton")
    logits = torch.nn.functional.linear(hidden[:64], weight)
    truth = token_statistics(logits.double(), labels[:64], impl="reference")
    gaps = [float((ours - exact).abs().max()) for ours, exact in zip(found, truth, strict=True)]
    report("from hidden", "largest gap to the whole bf16 product's", log_prob=gaps[0], entropy=gaps[1], sum_pi2=gaps[2])


def write() -> None:
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    out.mkdir(parents=True, exist_ok=True)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with open(out / "gpu_check.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)
    lines = ["| section | what | figures |", "| --- | --- | --- |"]
    for row in rows:
        figures = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("section", "what"))
        lines.append(f"| {row['section']} | {row['what']} | {figures} |")
    (out / "gpu_check.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    start = time.perf_counter()
    copy = float("nan")

    def attempt(step: Callable[..., object], *arguments: object) -> object:
        """One step's failure must not cost the others: the machine is lent by the minute."""
        try:
            return step(*arguments)
        except Exception:
            failures.append(step.__name__)
            traceback.print_exc()
            report(step.__name__, "FAILED", error=traceback.format_exc().strip().splitlines()[-1][:200])
            return None
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.empty_cache()
            print(f"             ({time.perf_counter() - start:.0f} s)", flush=True)
            write()

    torch.manual_seed(0)
    attempt(environment)
    attempt(correctness)
    copy = attempt(copy_bandwidth) or copy
    best = attempt(tune, copy)
    if best is not None and "LAUNCH" not in os.environ:
        triton_kernels.DEFAULT = best
    for tokens in TOKENS:
        attempt(from_logits, tokens, copy)
    attempt(from_hidden)
    if ON_GPU:
        attempt(no_waiting)
    print("failed:", ", ".join(failures) or "nothing", f"in {time.perf_counter() - start:.0f} s")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
