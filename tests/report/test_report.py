"""Reports from a dump that the plugin's own writer made, and from lines as verl's `file` logger writes them."""

import argparse
import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from made_run import put_dump, put_metrics

from verl_otb.report import add_parser, main
from verl_otb.report.data import choose_group, find_dump, read_metrics
from verl_otb.report.pictures import of_runs

# What the page itself is made of.
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "div", "span"}
TAGS |= {"strong", "table", "tr", "th", "td", "ul", "li", "figure", "img", "figcaption"}
PNG = b"\x89PNG\r\n\x1a\n"


def report(*args):
    return main(list(map(str, args)))


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.images, self.texts = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs)["src"])

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def run(tmp_path):
    put_dump(put_metrics(tmp_path / "otb"))
    return tmp_path / "otb"


def test_both_files_with_all_in_them(run, tmp_path, capsys):
    put_metrics(tmp_path / "grpo", otb=False)
    assert report(run, "--beside", tmp_path / "grpo", "--out", tmp_path / "new" / "out") == 0
    picture = (tmp_path / "new" / "out" / "report.png").read_bytes()
    width, height = np.frombuffer(picture[16:24], ">u4")
    assert picture.startswith(PNG)
    assert width == 1500
    assert height > 1000
    text = (tmp_path / "new" / "out" / "report.html").read_text()
    page = _Page(text)
    assert len(page.images) == 6
    for image in page.images:
        assert base64.b64decode(image.removeprefix("data:image/png;base64,")).startswith(PNG)
    assert not re.search(
        r"https?:|//\w|<script|<link|@import", re.sub(r"base64,[^\"]*", "", text)
    )  # nothing from elsewhere
    assert "One prompt group: step 3, group 1" in text
    assert "uid b, 3 responses, compared at the same position" in text
    out = capsys.readouterr().out
    assert "report.png" in out
    assert "report.html" in out
    assert (
        "gradient power of grpo: no number under otb/gradient_power among the metrics, which runs with OTB log" in out
    )
    assert "gradient power of grpo" in text


def test_options_that_are_not_the_default_are_named(run, tmp_path):
    assert report(run) == 0
    assert "algorithm.otb" not in (run / "report.html").read_text()
    put_dump(tmp_path, align="token", leave_one_out=True, weight="uniform", handle_zero_tail=False)
    assert report(tmp_path) == 0
    texts = "".join(_Page((tmp_path / "report.html").read_text()).texts)
    options = "algorithm.otb.handle_zero_tail=False, algorithm.otb.leave_one_out=True, algorithm.otb.weight=uniform"
    assert options in texts
    assert "baseline B (the mean of the responses' own: leave_one_out)" in texts
    assert "Not the weight here (uniform)" in texts


def test_a_dump_of_an_older_version_has_the_defaults(run):
    put_dump(run, step=4, finished_rows="carry")
    file = run / "dump" / "step_4.npz"
    arrays = dict(np.load(file))
    assert choose_group({4: file}).method.finished_rows == "carry"
    later = ("handle_zero_tail", "leave_one_out", "weight", "finished_rows")
    np.savez(file, **{name: values for name, values in arrays.items() if name not in later})
    assert choose_group({4: file}).method.changed() == []
    assert report(run) == 0


def test_the_files_lie_beside_the_run_unless_told_otherwise(run):
    assert report(run) == 0
    assert (run / "report.png").exists()
    assert (run / "report.html").exists()


@pytest.mark.parametrize("there", ["metrics", "dump"])
def test_what_is_missing_is_said(tmp_path, capsys, there):
    run = tmp_path / "half"
    put_metrics(run) if there == "metrics" else put_dump(run)
    assert report(run) == 0
    text, out = (run / "report.html").read_text(), capsys.readouterr().out
    said = f"half over its steps: no metrics in {run}" if there == "dump" else f"a prompt group: no dump in {run}"
    assert said in out
    assert said in "".join(_Page(text).texts)
    assert len(_Page(text).images) == 3
    assert (run / "report.png").read_bytes().startswith(PNG)


def test_nothing_at_all(tmp_path, capsys):
    assert report(tmp_path) == 1
    error = capsys.readouterr().err
    assert "nothing to draw" in error
    assert "VERL_FILE_LOGGER_PATH=" in error
    assert "+algorithm.otb.dump_dir=" in error
    assert list(tmp_path.iterdir()) == []
    assert report(tmp_path / "none") == 1
    assert "is not there" in capsys.readouterr().err


def test_a_run_beside_it_that_is_not_there(run, tmp_path, capsys):
    assert report(run, "--beside", tmp_path / "none") == 1
    assert f"{tmp_path / 'none'} is not there" in capsys.readouterr().err


def test_metrics_of_another_kind_are_nothing(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"loss": 1}}\n')
    assert report(tmp_path) == 1
    assert "no number under critic/score/mean or critic/rewards/mean among the metrics" in capsys.readouterr().err


def test_tokens_are_shown_as_text_and_nothing_else(tmp_path, tiny_task):
    """Whatever a model writes, it is no markup of the page."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_task.model)
    tokenizer.add_tokens(["<svg onload=x>", "</div><i>", "a\u202eb"])  # its own tokens are of one byte
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    written = ["<svg onload=x>12345", "</div><i>12345", 'a\u202eb12"34', "&lt;b>", "\x00\x07\n12345", "é</td>"]
    ids = torch.tensor([tokenizer.encode(text)[:6] for text in written])
    put_dump(tmp_path, responses=ids)
    pages = {}
    for uid in "ab":
        assert report(tmp_path, "--tokenizer", tmp_path / "tokenizer", "--group", uid) == 0
        pages[uid] = (tmp_path / "report.html").read_text()
        page = _Page(pages[uid])
        assert page.tags <= TAGS
        assert len(page.images) == 3
        assert not set(pages[uid]) & {"\x00", "\x07", "\u202e", "\ufffd"}
        if uid == "a":
            assert {"<svg onload=x>", "</div><i>", "a·b"} <= set(page.texts)
    text = pages["b"]
    assert {"&", "↵\n", "·"} <= set(_Page(text).texts)
    spans = re.findall(
        r'<span title="token (\d+): w ([\d.e-]+),[^"]*" style="background:rgba\(230,110,10,([\d.]+)\)">', text
    )
    group = choose_group(find_dump(tmp_path))
    assert len(spans) == group.mask.sum()
    for (_, energy, shade), wanted in zip(spans, group.token_energy[group.mask], strict=True):
        assert float(energy) == pytest.approx(wanted, rel=1e-3)
        assert float(shade) == pytest.approx(0.9 * min(wanted, 1), abs=1e-3)
    assert text.count('<span class="masked">') == 4  # tool output: what lies after a row's end is left out


@pytest.mark.parametrize("tokens", ["no ids in the dump", "no tokenizer", "a path that is none"])
def test_without_tokens(tmp_path, tiny_task, capsys, tokens):
    put_dump(tmp_path, responses=None if tokens == "no ids in the dump" else torch.ones(6, 6, dtype=torch.int64))
    path = {"no tokenizer": [], "a path that is none": ["--tokenizer", tmp_path]}.get(tokens, ["--tokenizer", "x"])
    assert report(tmp_path, *path) == 0
    said = {"no ids in the dump": "the dump has no token ids", "no tokenizer": "name the model's tokenizer"}
    assert said.get(tokens, f"no tokenizer from {tmp_path}") in capsys.readouterr().out


def test_without_matplotlib(run):
    """A process of its own, in which matplotlib cannot be imported."""
    code = (
        "import sys; sys.modules['matplotlib'] = None; from verl_otb.report import main; sys.exit(main(sys.argv[1:]))"
    )
    found = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == (
        'verl-otb report: the report needs matplotlib. Install it with: pip install "verl-otb[plot]"\n'
    )
    assert not (run / "report.html").exists()


def test_it_runs_as_a_module_and_imports_neither_verl_nor_ray(run):
    found = subprocess.run([sys.executable, "-m", "verl_otb.report", run], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    code = "import sys, verl_otb.report; print([m for m in ('verl', 'ray', 'matplotlib') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_as_a_subcommand(run):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", str(run)])
    assert args.run(args) == 0


def test_options_without_a_dump(tmp_path, capsys):
    put_metrics(tmp_path)
    for option in (["--step", 1], ["--group", 1], ["--dump", tmp_path]):
        assert report(tmp_path, *option) == 1
        assert "need a dump" in capsys.readouterr().err


def test_a_dump_elsewhere(tmp_path):
    put_metrics(tmp_path / "run")
    put_dump(tmp_path / "elsewhere")
    assert report(tmp_path / "run", "--dump", tmp_path / "elsewhere" / "dump") == 0
    assert len(_Page((tmp_path / "run" / "report.html").read_text()).images) == 6


def damage(file: Path, how: str) -> None:
    if how == "cut":
        file.write_bytes(b"PK")
    elif how == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 3 : len(content) // 3 + 40] = bytes(40)
        file.write_bytes(content)
    else:
        with np.load(file) as arrays:
            np.savez(file, **{**arrays, "returns": arrays["returns"][:-1]})


@pytest.mark.parametrize("how", ["cut", "flipped", "arrays of other rows"])
def test_a_damaged_file(run, capsys, how):
    damage(run / "dump" / "step_3.npz", how)
    assert report(run) == 1
    assert "step_3.npz is damaged" in capsys.readouterr().err
    put_dump(run, step=4)
    assert report(run) == 0
    out = capsys.readouterr().out
    assert "step_3.npz is damaged" in out
    assert "step 4" in (run / "report.html").read_text()


def test_a_dump_of_another_run(run, capsys):
    put_dump(run, step=107)
    assert report(run) == 0
    assert "the dump goes to step 107, the metrics to 30: of another run?" in capsys.readouterr().out


def test_metrics_that_are_no_numbers(tmp_path, capsys):
    values = [float("nan"), None, "0.5", [1], 10**400, float("inf")]
    lines = [{"step": step, "data": {"critic/score/mean": value}} for step, value in enumerate(values, 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": Infinity, "data": {}}\n')
    assert report(tmp_path) == 1
    assert "no number under critic/score/mean" in capsys.readouterr().err


@pytest.mark.parametrize("name", [r"lr$\bad{$x", "_under", "a$b$c"])
def test_a_name_is_shown_as_it_is(tmp_path, name):
    """In the legend: matplotlib takes dollars for formulas, and hides names that begin with an underscore."""
    from matplotlib.figure import Figure

    run = read_metrics(put_metrics(tmp_path / name) / "metrics.jsonl", name)
    figure = Figure()
    of_runs([run])[0].draw(figure)
    (shown,) = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown.replace(r"\$", "$").strip() == name
    assert report(tmp_path / name) == 0


def test_verl_s_own_place_for_metrics(tmp_path, capsys):
    """PROJECT/EXPERIMENT.jsonl: the one file of such lines in a directory, or named itself."""
    project = put_metrics(tmp_path / "project")
    (project / "metrics.jsonl").rename(project / "experiment.jsonl")
    (project / "rollouts.jsonl").write_text('{"input": "1+1=", "output": "2"}\n')
    assert report(project) == 0
    assert report(project / "experiment.jsonl") == 0
    (project / "other.jsonl").write_text((project / "experiment.jsonl").read_text())
    assert report(project) == 1
    assert "several runs' metrics: experiment.jsonl, other.jsonl" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_to(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert report(run, "--out", tmp_path / "file") == 1
    assert "Name another directory with --out" in capsys.readouterr().err
