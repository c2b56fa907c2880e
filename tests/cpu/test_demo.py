"""What surrounds the demo's training: its inputs, its table, and that no process is left. The training: tests/e2e."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from verl_run import REPOSITORY

DEMO = REPOSITORY / "examples" / "run_tiny_cpu.sh"
SUPERVISE = [sys.executable, str(REPOSITORY / "examples" / "supervise.py")]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STEPS": "many"}, "STEPS=many is not a positive whole number"),
        ({"STEPS": "0"}, "STEPS=0 is not a positive whole number"),
        ({"MAX_RESPONSE_LENGTH": "-1"}, "MAX_RESPONSE_LENGTH=-1 is not a positive whole number"),
        ({"TRAIN_FILE": "no.parquet"}, "TRAIN_FILE=no.parquet is not a file"),
        ({"REWARD_FILE": "no.py"}, "REWARD_FILE=no.py is not a file"),
        ({"MODEL_PATH": "/no/such/model"}, "MODEL_PATH=/no/such/model is neither a directory nor a name"),
        ({"MODEL_PATH": "."}, "MODEL_PATH=. has no config.json"),
        ({"ADV_ESTIMATOR": "gae"}, "found     ADV_ESTIMATOR=gae"),
        ({"PYTHON": "/a b/python"}, "a path without spaces and quotes"),
        ({"PYTHON": "/no/python"}, "PYTHON=/no/python has no verl or no vllm; run `make env`"),
    ],
)
def test_wrong_inputs_stop_at_once(tmp_path, variables, message):
    environment = {**os.environ, "PYTHON": sys.executable, "OUT_DIR": str(tmp_path / "out"), **variables}
    run = subprocess.run([DEMO], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert message in run.stderr
    assert not (tmp_path / "out").exists()


def test_a_directory_with_a_run_in_it_is_left_alone(tmp_path):
    (tmp_path / "dump").mkdir()
    environment = {**os.environ, "PYTHON": sys.executable, "OUT_DIR": str(tmp_path)}
    run = subprocess.run([DEMO], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert f"OUT_DIR={tmp_path} has a run in it" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]


@pytest.mark.parametrize("otb", [True, False])
def test_table(tmp_path, otb):
    def line(step: int) -> str:
        baseline = {"otb/baseline/mean": step / 2, "otb/realized_energy/mean": 2.0} if otb else {}
        return json.dumps(
            {"step": step, "data": {"critic/score/mean": step, "perf/total_num_tokens": 1000, **baseline}}
        )

    validation = json.dumps({"step": 0, "data": {"val-core/tiny/addition/acc/mean@1": 0.5}})
    (tmp_path / "metrics.jsonl").write_text("\n".join([validation, *map(line, range(1, 31))]) + "\n")
    (tmp_path / "usage.json").write_text('{"wall_seconds": 200.4, "peak_bytes": 5368709120}')
    script = REPOSITORY / "examples" / "summarize.py"
    table = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=True).stdout
    rows = dict(row.split("  ", 1) for row in table.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["reward, first 10 steps"] == "5.5000"
    assert rows["reward, last 10 steps"] == "25.5000"
    assert rows["steps"] == "30"
    assert rows["tokens"] == "30,000"
    assert rows["mean baseline"] == ("7.7500" if otb else "-")
    assert rows["mean realized energy"] == ("2.0000" if otb else "-")
    assert rows["wall time"] == "3 min 20 s"
    assert rows["peak memory, all processes"] == "5.0 GiB"


def test_without_matplotlib_the_demo_ends_well_and_says_so(tmp_path):
    """Its last lines alone, after a training that has ended."""
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    last_lines = DEMO.read_text().partition("# Pictures of the run")[2].partition("\n")[2]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
        "OUT_DIR": str(tmp_path),
        "MODEL_PATH": "none",
    }
    command = ["bash", "-euo", "pipefail", "-c", last_lines]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == (
        "pictures of the run         none: verl-otb report: the report needs matplotlib. "
        'Install it with: pip install "verl-otb[plot]"\n'
    )


# A child that leaves its session and its parent, as Ray's do, and says which it is.
RUNAWAY = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        open(sys.argv[1] + '.part', 'w').write(str(os.getpid()))\n"
    "        os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
    "        time.sleep(300)\n"
    "    os._exit(0)\n"
    "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_supervise_ends_what_the_command_leaves(tmp_path):
    command = [
        *SUPERVISE,
        f"--usage={tmp_path}/usage.json",
        "--",
        sys.executable,
        "-c",
        RUNAWAY + "time.sleep(1); sys.exit(7)",
    ]
    run = subprocess.run([*command, str(tmp_path / "pid")], timeout=60, check=False)
    assert run.returncode == 7
    assert not is_running(int((tmp_path / "pid").read_text()))
    usage = json.loads((tmp_path / "usage.json").read_text())
    assert usage["peak_bytes"] > 1 << 20
    assert usage["wall_seconds"] < 60


@pytest.mark.parametrize("milliseconds", [0, 1, 3, 10])
def test_supervise_ends_the_tree_however_often_it_is_told(milliseconds):
    """`timeout` and `kill -- -GROUP` signal the whole group, and so does the script's own trap right after."""
    many = "import subprocess as s, sys; [s.Popen(['sleep', '300']) for _ in range(30)]; print(flush=True); s.os.wait()"
    run = subprocess.Popen([*SUPERVISE, "--", sys.executable, "-c", many], stdout=subprocess.PIPE)
    run.stdout.readline()
    tree = psutil.Process(run.pid).children(recursive=True)
    assert len(tree) == 31
    for _ in range(3):
        run.terminate()
        time.sleep(milliseconds / 1000)
    assert run.wait(60) == 128 + signal.SIGTERM
    assert not [process.pid for process in tree if is_running(process.pid)]


def test_supervise_ends_the_tree_after_the_timeout(tmp_path):
    command = [*SUPERVISE, "--timeout=8", "--", sys.executable, "-c", RUNAWAY + "time.sleep(300)"]
    run = subprocess.run([*command, str(tmp_path / "pid")], timeout=60, check=False)
    assert run.returncode == 124
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_supervise_ends_the_tree_when_interrupted(tmp_path: Path, number):
    pid_file = tmp_path / "pid"
    command = [*SUPERVISE, "--", sys.executable, "-c", RUNAWAY + "time.sleep(300)", str(pid_file)]
    supervisor = subprocess.Popen(command)
    deadline = time.monotonic() + 30
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    supervisor.send_signal(number)
    assert supervisor.wait(timeout=30) == 128 + number
    assert not is_running(int(pid_file.read_text()))
