r"""Problems of our own in the formats in which GSM8K and MATH are published, for the data preparation's tests."""

import json
from pathlib import Path

import pandas

GSM8K = {
    "train": [
        {
            "question": "A shelf holds 6 boxes of 12 pens. How many pens is that?",
            "answer": "Each box holds 12 pens.\nSo 6 * 12 = <<6*12=72>>72 pens.\n#### 72",
        },
        {
            "question": "A town of 1,250 people grows by 10 people. How many live there now?",
            "answer": "1250 + 10 = <<1250+10=1260>>1260.\n#### 1,260",
        },
        {
            "question": "It is 3 degrees and gets 8 degrees colder. How many degrees is it then?",
            "answer": "3 - 8 = <<3-8=-5>>-5.\n#### -5",
        },
    ],
    "test": [{"question": "What do 4 tickets at 9 pounds cost?", "answer": "4 * 9 = <<4*9=36>>36.\n#### 36"}],
}
MATH = {
    "train": [
        {
            "problem": "What is half of $\\frac{3}{5}$?",
            "level": "Level 1",
            "solution": "Halving gives $\\frac{3}{5} \\cdot \\frac12 = \\boxed{\\frac{3}{10}}.$",
            "type": "Prealgebra",
        },
        {
            "problem": "Write $\\sqrt{\\frac{9}{2}}$ without a root below the bar.",
            "level": "Level 2",
            "solution": "First we find $\\boxed{3}$ above, then altogether $\\boxed{\\frac{3\\sqrt{2}}{2}}$.",
            "type": "Algebra",
        },
        {
            "problem": "What is $1+6$?",
            "level": "Level 1",
            "solution": "We add: $1+6=\\boxed 7$, which is prime.",
            "type": "Prealgebra",
        },
    ],
    "test": [
        {
            "problem": "Where do the lines $y=x$ and $y=2-x$ meet?",
            "level": "Level 2",
            "solution": "At $\\boxed{\\left\\{(1,1)\\right\\}}$ alone.",
            "type": "Algebra",
        }
    ],
}
BY_SUBJECT = ("algebra", "prealgebra")


def as_on_the_hub(directory: Path) -> Path:
    """Parquet files as in clones of the two repositories on the Hub, each with its other configurations."""
    for split, rows in GSM8K.items():
        socratic = [{**row, "answer": f"How many? ** {row['answer']}"} for row in rows]
        _parquet(directory / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet", rows)
        _parquet(directory / "gsm8k" / "socratic" / f"{split}-00000-of-00001.parquet", socratic)
    for split, rows in MATH.items():
        _parquet(directory / "math" / "data" / f"{split}-00000-of-00001.parquet", rows)
        for subject in BY_SUBJECT:
            of_it = [row for row in rows if row["type"].lower() == subject]
            _parquet(directory / "math" / subject / f"{split}-00000-of-00001.parquet", of_it or rows)
    return directory


def as_by_the_authors(directory: Path) -> Path:
    """GSM8K as lines of JSON, MATH as a file a problem: what the authors' own archives unpack to."""
    for split, rows in GSM8K.items():
        folder = directory / "gsm8k" / "grade_school_math" / "data"
        folder.mkdir(parents=True, exist_ok=True)
        for name in (f"{split}.jsonl", f"{split}_socratic.jsonl"):
            (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for split, rows in MATH.items():
        for number, row in enumerate(rows):
            folder = directory / "math" / "MATH" / split / row["type"].lower()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.json").write_text(json.dumps(row))
    return directory


def _parquet(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(path)
