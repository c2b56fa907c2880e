"""What `pip install verl-otb` brings: its content, and a run with it alone."""

import subprocess
import zipfile

import pytest
from built_wheel import build, environment_with
from otb_runs import ACTIVE, DENSE_REWARD
from verl_run import REPOSITORY

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


def test_content(wheel):
    """The package, all of it and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    source = {
        str(path.relative_to(REPOSITORY / "src"))
        for path in (REPOSITORY / "src" / "verl_otb").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == source
    assert "verl_otb/py.typed" in source
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "otb = verl_otb.plugin" in entry_points
    assert "otb_cpu = verl_otb.cpu.plugin" in entry_points
    assert "verl-otb = verl_otb.cli:main" in entry_points


def test_a_run_with_the_wheel_alone(wheel, run_verl, tmp_path):
    python = environment_with(wheel, tmp_path / "environment")
    code = "import verl_otb, importlib.metadata as m; print(verl_otb.__file__, m.version('verl-otb'))"
    where = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(tmp_path))
    run = run_verl(DENSE_REWARD, "trainer.total_training_steps=2", python=python)
    assert run.log.count(ACTIVE) == 1
    assert [line["step"] for line in run.metrics] == [1, 2]
    for line in run.metrics:
        assert line["otb/realized_energy/mean"] > 0
        assert line["actor/grad_norm"] > 0
    assert str(REPOSITORY / "src") not in run.log
