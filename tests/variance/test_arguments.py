"""The scripts of the evidence refuse what they cannot do before they work, and leave the results as they are."""

import importlib
import sys

import pytest
import table

HEADER = "step,reward,validation,tokens,grad_norm,gradient_power\n"


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("exact", "--tokens 1", "--tokens: expected at least 2, found 1"),
        ("exact", "--words 1", "--words: expected at least 2, found 1"),
        ("finite_groups", "--seeds 0", "--seeds: expected at least 1, found 0"),
        ("finite_groups", "--rows 600", "--rows 600: at least 1280"),
        ("cost", "--steps 2", "--steps: expected at least 3, found 2"),
        ("gradient", "--steps 0 -1", "--steps: expected at least 0, found -1"),
        ("gradient", "--sizes 1 4", "--sizes: expected at least 2, found 1"),
        ("gradient", "--rows 30", "--rows 30 are not 8 blocks"),
        ("gradient", "--model there", "--model needs --prompts and --reward"),
        ("training", "--jobs 0", "--jobs: expected at least 1, found 0"),
        ("training", "--only none", "matches no run; names are like otb-n4-seed0"),
    ],
)
def test_arguments(script, arguments, words, monkeypatch, capsys, tmp_path):
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        module.main()
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "option"),
    [("exact", "--results"), ("finite_groups", "--results"), ("cost", "--out"), ("gradient", "--out")],
)
def test_results_that_cannot_be_written(script, option, monkeypatch, tmp_path):
    module = importlib.import_module(script)
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", [script, option, str(tmp_path / "file" / "results")])
    with pytest.raises(SystemExit, match=r"results cannot be written to .*file/results"):
        module.main()


def test_a_run_of_other_steps_is_not_taken_for_this_one(monkeypatch, capsys, tmp_path):
    import training

    (tmp_path / "otb-n4-seed0.csv").write_text(HEADER + "1,0,,8,0,\n" * 60)
    monkeypatch.setattr(sys, "argv", ["training", "--results", str(tmp_path), "--list"])
    with pytest.raises(SystemExit):
        training.main()
    assert "is of 60 steps, not of 120" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--steps", "60"])
    training.main()
    assert len(capsys.readouterr().out.splitlines()) == 29


def test_a_table_is_written_whole_or_not_at_all(tmp_path, capsys):
    path = tmp_path / "some" / "where" / "table.csv"
    table.write_table([{"a": 1, "b": 0.123456, "c": float("nan"), "d": 1e-16}], path)
    assert path.read_text().split() == ["a,b,c,d", "1,0.1235,nan,0"]
    capsys.readouterr()
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        table.write_table([{"a": 1}, {"a": 2, "c": 3}], path)
    assert path.read_text().split() == ["a,b,c,d", "1,0.1235,nan,0"]
    table.write_table([{"a": 1}], path, show=False)
    assert not capsys.readouterr().out
