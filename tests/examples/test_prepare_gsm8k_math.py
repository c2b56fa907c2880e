"""The data of the Qwen3-8B example: from each format it is published in, to what verl's scorers and reader take."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import small_math
from verl_run import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "data" / "prepare_gsm8k_math.py"
SPLITS = [(name, split) for name in ("gsm8k", "math") for split in ("train", "test")]
FORMATS = {"hub": small_math.as_on_the_hub, "authors": small_math.as_by_the_authors}


def prepare(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prepare_gsm8k_math", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks for its own module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=FORMATS)
def made(request, tmp_path_factory):
    """DIR of a run on local copies in one of the two formats."""
    directory = tmp_path_factory.mktemp(request.param)
    done = prepare("--data-dir", directory / "made", "--local-dir", FORMATS[request.param](directory / "copies"))
    assert done.returncode == 0, done.stderr
    assert "gsm8k/train" in done.stderr, "no progress"
    assert f"{directory}/made/math/train.parquet: 3 rows" in done.stdout
    return directory / "made"


def rows(directory, name, split):
    return pandas.read_parquet(directory / name / f"{split}.parquet").to_dict("records")


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_schema_and_no_row_lost_or_doubled(made, name, split):
    published = {"gsm8k": small_math.GSM8K, "math": small_math.MATH}[name][split]
    question = {"gsm8k": "question", "math": "problem"}[name]
    found = rows(made, name, split)
    assert sorted(row["extra_info"]["question"] for row in found) == sorted(row[question] for row in published)
    for index, row in enumerate(found):
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert row["prompt"][0]["content"].startswith(row["extra_info"]["question"])
        assert row["reward_model"]["style"] == "rule"
        assert (row["extra_info"]["split"], row["extra_info"]["index"]) == (split, index)


def test_ground_truths(made):
    truths = {
        (name, split): {row["reward_model"]["ground_truth"] for row in rows(made, name, split)}
        for name, split in SPLITS
    }
    assert truths == {
        ("gsm8k", "train"): {"72", "1260", "-5"},
        ("gsm8k", "test"): {"36"},
        ("math", "train"): {r"\frac{3}{10}", r"\frac{3\sqrt{2}}{2}", "7"},
        ("math", "test"): {r"\left\{(1,1)\right\}"},
    }


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_verl_s_own_scorer(made, name, split):
    """The published answer scores 1, another number 0, an answer in no format 0."""
    from verl.utils.reward_score import default_compute_score

    wrong = {"gsm8k": "#### 17", "math": r"\boxed{17}"}[name]
    for row in rows(made, name, split):
        truth = row["reward_model"]["ground_truth"]
        right = {"gsm8k": f"#### {truth}", "math": rf"\boxed{{{truth}}}"}[name]
        scores = [
            default_compute_score(row["data_source"], text, truth)
            for text in (row["extra_info"]["answer"], f"So it is\n{right}", wrong, "It is hard to say.")
        ]
        assert scores == [1, 1, 0, 0], row


def test_verl_reads_them(made, tiny_task):
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl_config import verl_config

    config = verl_config("data.filter_overlong_prompts=True", "actor_rollout_ref.rollout.name=vllm").data
    files = [str(made / name / "train.parquet") for name in ("gsm8k", "math")]
    tokenizer = AutoTokenizer.from_pretrained(tiny_task.model)
    dataset = RLHFDataset(files, tokenizer, OmegaConf.create(OmegaConf.to_container(config)))
    assert len(dataset) == 6
    assert [row["data_source"].split("/")[-1] for row in dataset] == ["gsm8k"] * 3 + ["MATH-lighteval"] * 3


def test_box_and_number(script):
    assert script.number_after_hashes("1 #### 2\n#### 1,234,567 ") == "1234567"
    assert script.number_after_hashes("#### 0.5") == "0.5"
    assert script.last_boxed(r"\boxed{1} or \boxed{a{b{c}}d}") == "a{b{c}}d"
    assert script.last_boxed(r"\fbox{4}") == "4"
    assert script.last_boxed(r"$\boxed 2$ in all") == "2"
    for broken in ("no answer", "#### about five", "####", "#### .", "#### -", "#### 1.2.3"):
        with pytest.raises(script.DataError, match="no number"):
            script.number_after_hashes(broken)
    with pytest.raises(script.DataError, match="do not close"):
        script.last_boxed(r"\boxed{\frac{1}{2}")
    with pytest.raises(script.DataError, match=r"no \\boxed"):
        script.last_boxed("42")


def test_bad_row_is_named_and_what_is_there_stays(tmp_path):
    """The error is in the last of the four; the first three are not written either."""
    copies = small_math.as_by_the_authors(tmp_path / "copies")
    (copies / "math" / "MATH" / "test" / "algebra" / "0.json").write_text('{"problem": "1+1?", "solution": "It is 2."}')
    before = tmp_path / "made" / "gsm8k" / "train.parquet"
    before.parent.mkdir(parents=True)
    before.write_bytes(b"of an earlier run")
    done = prepare("--data-dir", tmp_path / "made", "--local-dir", copies)
    assert done.returncode == 2
    assert r"prepare_gsm8k_math.py: math/test: row 0: no \boxed in 'It is 2.'" in done.stderr
    assert before.read_bytes() == b"of an earlier run"
    assert [path for path in (tmp_path / "made").rglob("*") if path.is_file()] == [before]


def test_missing_columns(tmp_path):
    copies = small_math.as_by_the_authors(tmp_path)
    (copies / "gsm8k" / "grade_school_math" / "data" / "test.jsonl").write_text('{"question": "1+1?", "reply": "2"}\n')
    done = prepare("--data-dir", tmp_path / "made", "--local-dir", copies)
    assert done.returncode == 2
    assert "gsm8k/test: columns ['answer'] are missing; found ['question', 'reply']" in done.stderr


def test_unreadable_file(tmp_path):
    copies = small_math.as_by_the_authors(tmp_path)
    (copies / "gsm8k" / "grade_school_math" / "data" / "test.jsonl").write_text("<html>not found</html>")
    done = prepare("--data-dir", tmp_path / "made", "--local-dir", copies)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("prepare_gsm8k_math.py: gsm8k/test: ")


def test_a_file_that_is_there_twice(tmp_path):
    copies = small_math.as_on_the_hub(tmp_path)
    shutil.copytree(copies / "gsm8k" / "main", copies / "gsm8k" / "old" / "main")
    done = prepare("--data-dir", tmp_path / "made", "--local-dir", copies)
    assert done.returncode == 2
    assert "gsm8k/train: one file several times" in done.stderr


def test_no_copies(tmp_path):
    done = prepare("--data-dir", tmp_path / "made", "--local-dir", tmp_path)
    assert done.returncode == 2
    assert f"gsm8k/train: no train*.parquet, train*.jsonl or train/*.json in {tmp_path}/gsm8k or below" in done.stderr


def test_no_hub(tmp_path):
    """What happens where the Hub is out of reach and nothing of it is on this machine."""
    done = prepare("--data-dir", tmp_path / "made", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert done.returncode == 2
    assert "gsm8k/train: openai/gsm8k cannot be read from the Hugging Face Hub: " in done.stderr
    assert "give --local-dir COPIES" in done.stderr
    assert not (tmp_path / "made").exists()


def test_half_a_file_is_never_seen(script, tmp_path, monkeypatch):
    """A write that fails on the way, as on a full disk, leaves the file of before and nothing beside it."""
    path = tmp_path / "train.parquet"
    path.write_bytes(b"of an earlier run")

    def runs_out_of_disk(self, target):
        Path(target).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pandas.DataFrame, "to_parquet", runs_out_of_disk)
    with pytest.raises(OSError, match="No space"):
        script.write(pandas.DataFrame({"a": [1]}), path)
    assert path.read_bytes() == b"of an earlier run"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pandas.DataFrame({"question": [], "answer": []}), "there are no rows"),
        (pandas.DataFrame({"question": ["1?", None], "answer": ["#### 1"] * 2}), "row 1: question is to be a text"),
        (pandas.DataFrame({"question": [" "], "answer": ["#### 1"]}), "row 0: question is to be a text"),
    ],
)
def test_rows_that_are_none(script, table, words):
    with pytest.raises(script.DataError, match=words):
        script.to_verl(script.SOURCES[0], "train", table)


def test_an_empty_answer(script):
    table = pandas.DataFrame({"problem": ["1?"], "solution": [r"It is \boxed{}."]})
    with pytest.raises(script.DataError, match="row 0: the answer is empty"):
        script.to_verl(script.SOURCES[1], "train", table)


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    done = prepare("--data-dir", tmp_path / "file", "--local-dir", small_math.as_on_the_hub(tmp_path / "copies"))
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
