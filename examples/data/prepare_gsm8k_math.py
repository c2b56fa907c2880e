"""Make the four parquet files of run_qwen3_8b_fsdp.sh: GSM8K and MATH, train and test, in verl's schema.

    python examples/data/prepare_gsm8k_math.py [--data-dir DIR] [--local-dir COPIES]

Writes DIR/gsm8k/{train,test}.parquet and DIR/math/{train,test}.parquet; DIR is $DATA_DIR or ~/data by default.
Reads the Hugging Face Hub, or with --local-dir COPIES/gsm8k and COPIES/math: anywhere below them the data as its
authors publish it, a split in files train*.parquet or train*.jsonl, or (MATH) in a folder train/ of *.json.
Rewards come from verl's own scorers, chosen by `data_source`.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas
from tqdm import tqdm

SPLITS = ("train", "test")


class DataError(Exception):
    """The data is not there, or not as its authors publish it."""


def number_after_hashes(answer: str) -> str:
    """GSM8K: the number after the last ####, without thousands separators, as verl's scorer compares it.

    Raises:
        DataError: if there is none, or if it is not written as that scorer reads numbers.
    """
    _, hashes, number = answer.rpartition("####")
    number = number.strip().replace(",", "")
    if not hashes or not re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)", number):
        raise DataError(f"no number after '####' at the end of {answer[-60:]!r}")
    return number


def last_boxed(solution: str) -> str:
    r"""MATH: what is in the last \boxed{...} (braces may nest), or after the last \boxed without braces up to a $.

    Raises:
        DataError: if there is none, or if its braces do not close.
    """
    boxes = list(re.finditer(r"\\(?:boxed|fbox)\s*", solution))
    if not boxes:
        raise DataError(rf"no \boxed in {solution[-60:]!r}")
    inside = solution[boxes[-1].end() :]
    if not inside.startswith("{"):
        return inside.split("$")[0].strip()
    depth = 0
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[1:place]
    raise DataError(rf"the braces of the last \boxed do not close in {solution[-60:]!r}")


@dataclass(frozen=True)
class Source:
    """One of the two data sets: where it is, how its rows read, and what verl's scorer for it expects."""

    name: str
    hub: tuple[str, str]
    data_source: str
    question: str
    answer: str
    ground_truth: Callable[[str], str]
    instruction: str


SOURCES = (
    Source(
        name="gsm8k",
        hub=("openai/gsm8k", "main"),
        data_source="openai/gsm8k",
        question="question",
        answer="answer",
        ground_truth=number_after_hashes,
        instruction='Reason step by step. End with a line "#### " followed by the answer as a plain number.',
    ),
    Source(
        name="math",
        hub=("DigitalLearningGmbH/MATH-lighteval", "default"),
        data_source="DigitalLearningGmbH/MATH-lighteval",
        question="problem",
        answer="solution",
        ground_truth=last_boxed,
        instruction=r"Reason step by step. End with the answer in \boxed{}.",
    ),
)


def read_local(source: Source, split: str, copies: Path) -> pandas.DataFrame:
    """The rows of one split below copies/<name>.

    Raises:
        DataError: if no file holds them.
    """
    folder = copies / source.name
    # Beside its questions as a whole each set has them again: GSM8K with other answers, MATH by subject.
    below = [path for path in sorted(folder.rglob("*")) if "socratic" not in str(path.relative_to(folder))]
    below = [path for path in below if path.parent.name in ("main", "data", "default")] or below
    named = [path for path in below if path.name.startswith(split)]
    if tables := [path for path in named if path.suffix == ".parquet"]:
        if len({path.name for path in tables}) < len(tables):
            raise DataError(f"one file several times, so its rows too: {', '.join(map(str, tables))}. Keep one copy")
        return pandas.concat(map(pandas.read_parquet, tables), ignore_index=True)
    if lines := [path for path in named if path.suffix == ".jsonl"]:
        return pandas.concat([pandas.read_json(path, lines=True, dtype=False) for path in lines], ignore_index=True)
    problems = [path for path in below if path.suffix == ".json" and split in path.relative_to(folder).parts]
    if problems:
        return pandas.DataFrame([pandas.read_json(path, typ="series", dtype=False) for path in problems])
    raise DataError(f"no {split}*.parquet, {split}*.jsonl or {split}/*.json in {folder} or below")


def read_hub(source: Source, split: str) -> pandas.DataFrame:
    """The rows of one split from the Hugging Face Hub (or its cache on this machine).

    Raises:
        DataError: if they cannot be had.
    """
    import datasets

    try:
        return datasets.load_dataset(*source.hub, split=split).to_pandas()
    except Exception as error:  # whatever of many kinds: no network, no such name, a mirror's answer
        raise DataError(
            f"{source.hub[0]} cannot be read from the Hugging Face Hub: {type(error).__name__}: {error}\n"
            f"  Copy it to a folder COPIES/{source.name} by another way, and give --local-dir COPIES"
        ) from error


def to_verl(source: Source, split: str, rows: pandas.DataFrame) -> pandas.DataFrame:
    """The rows in verl's schema, in their order.

    Raises:
        DataError: names the first row, or the columns, that do not fit.
    """
    if missing := {source.question, source.answer} - set(rows.columns):
        raise DataError(f"columns {sorted(missing)} are missing; found {sorted(rows.columns)}")
    if rows.empty:
        raise DataError("there are no rows")
    pairs = zip(rows[source.question], rows[source.answer], strict=True)
    made = []
    for index, (question, answer) in enumerate(tqdm(pairs, f"{source.name}/{split}", total=len(rows), unit=" rows")):
        for column, text in ((source.question, question), (source.answer, answer)):
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"row {index}: {column} is to be a text, found {text!r}")
        try:
            truth = source.ground_truth(answer)
            if not truth:
                raise DataError("the answer is empty")
        except DataError as error:
            raise DataError(f"row {index}: {error}") from None
        made.append(
            {
                "data_source": source.data_source,
                "prompt": [{"role": "user", "content": f"{question}\n\n{source.instruction}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
            }
        )
    return pandas.DataFrame(made)


def write(table: pandas.DataFrame, path: Path) -> None:
    """All of the file or nothing: a reader never meets a half-written one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        table.to_parquet(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def prepare(data_dir: Path, local_dir: Path | None) -> None:
    """Make all four tables, then write them: data that does not fit leaves what is there as it was.

    Raises:
        DataError: names the data set and the split.
    """
    tables = {}
    for source in SOURCES:
        for split in SPLITS:
            try:
                rows = read_hub(source, split) if local_dir is None else read_local(source, split, local_dir)
                tables[data_dir / source.name / f"{split}.parquet"] = to_verl(source, split, rows)
            except (DataError, ValueError, OSError) as error:  # the last two: a file that cannot be read as what it is
                raise DataError(f"{source.name}/{split}: {error}") from error
    for path, table in tables.items():
        try:
            write(table, path)
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}. Choose another --data-dir") from error
        print(f"{path}: {len(table):,} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("DATA_DIR") or Path.home() / "data"
    parser.add_argument("--data-dir", type=Path, default=default, metavar="DIR", help="where the four files go")
    parser.add_argument("--local-dir", type=Path, metavar="COPIES", help="gsm8k/ and math/, instead of the Hub")
    try:
        prepare(**vars(parser.parse_args()))
    except DataError as error:
        print(f"prepare_gsm8k_math.py: {error}", file=sys.stderr)
        sys.exit(2)
