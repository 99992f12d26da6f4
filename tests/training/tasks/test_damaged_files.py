"""Data files of each task with a fault are rejected, with the location of the fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from albert_serve.bundle.manifest import ProblemType
from tests.training.support import write
from training.data.corpus import CorpusError
from training.data.labelled.columns import COMMON_COLUMNS, Columns
from training.tasks.classification.files import read_splits
from training.tasks.embeddings.files import read_similar
from training.tasks.multiple_choice.files import read_choices
from training.tasks.question_answering.files import read_squad
from training.tasks.token_classification.files import label_names, read_tagged

Reader: TypeAlias = Callable[[Sequence[Path]], Any]


def classification(
    problem: ProblemType, columns: Columns = COMMON_COLUMNS, names: Sequence[str] | None = None
) -> Reader:
    """Return a reader of text classification."""
    return lambda files: read_splits({"training": files}, names, columns, problem)


LONG_TEXTS: Final = f"text,label\n{'x' * 1_000_000},a\n{'x' * 1_000_001},b\n"
TWO_LABELS: Final = Columns(indicators=("sad", "glad"))
SINGLE: Final = classification("single_label_classification")
MULTI: Final = classification("multi_label_classification")
INDICATED: Final = classification("multi_label_classification", TWO_LABELS)
MISNAMED: Final = classification("multi_label_classification", TWO_LABELS, ["sad", "mad"])
INDICATED_SINGLE: Final = classification("single_label_classification", TWO_LABELS)
REGRESSION: Final = classification("regression")
NUMBERED: Final = classification("single_label_classification", names=["1", "2", "3"])
NAMED_SCORES: Final = classification("regression", names=["a", "b"])
RACE: Final = {"article": "a", "options": [["b", "c"]], "questions": ["?"], "answers": ["A"]}
CHOICE: Final = {"context": "a", "choices": ["b", "c"], "answer": 0}
SQUAD_ROW: Final = {"id": "1", "context": "a", "question": "?", "answers": []}
ADA: Final = {"text": "Ada", "entities": [{"start": 0, "end": 4, "label": "X"}]}
MIXED: Final = '{"query": "a", "answer": "b"}\n{"anchor": "a", "positive": "b", "negative": "c"}'
read_columns: Final = partial(read_similar, columns=("a", "b"))
read_scores: Final = partial(read_similar, columns=("x", "y", "score"))
read_four_columns: Final = partial(read_similar, columns=("a", "b", "c", "d"))


def read_label_names(files: Sequence[Path]) -> list[str]:
    return label_names(read_tagged(files))


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [
        (SINGLE, "a.tsv", "text\tclass\na\t1\n", "a.tsv, line 1: There is no column label or cat"),
        (SINGLE, "b.tsv", "text,label\nc,no\n", "are text,label. Is ',' the delimiter? Then set -"),
        (SINGLE, "a.txt", "text\n", "a.txt has no known suffix. Rename it to .csv, .tsv, "),
        pytest.param(SINGLE, "a.csv", LONG_TEXTS, "line 3: the column 'text' has", id="long"),
        (SINGLE, "a.jsonl", {"text": 5.5, "label": ["a"]}, "label contains lists. If texts have"),
        (SINGLE, "a.jsonl", {"text": ["x"], "label": "a"}, "line 1: ['x'] is not a text."),
        (SINGLE, "a.jsonl", {"text": "x", "label": {"a": 1}}, "label contains nested values."),
        (MULTI, "a.jsonl", {"text": "x", "label": None}, "line 1: Column label has no value."),
        (MULTI, "a.jsonl", {"text": "x", "label": "a"}, "does not contain lists. Set --label"),
        (INDICATED, "a.csv", "text,sad,glad\nx,1,yes\n", "column glad contains 'yes', not 0 or 1."),
        (MISNAMED, "a.csv", "text,sad,glad\nx,1,0\n", "glad does not match the labels sad, mad."),
        (INDICATED_SINGLE, "a.csv", "text,sad,glad\nx,1,0\n", ", require multi_label_classifica"),
        (NAMED_SCORES, "a.csv", "text,label\nx,1\n", "has one score, but --labels has 2 names."),
        (
            REGRESSION,
            "a.csv",
            "text,label\nx,-1\n",
            "There are no examples: 1 of 1 rows are omitted",
        ),
        (NUMBERED, "a.csv", "text,label\nx,0\ny,1\n", "line 2: Label '0' (1 rows) is not allowed."),
        (read_choices, "a.txt", "{", "a.txt is not JSON, which a .txt file of RACE must be: "),
        (read_choices, "a.txt", {"text": "a"}, "a.txt has no article, which a passage of RACE"),
        (read_choices, "a.txt", RACE | {"article": " "}, "a.txt: The passage has no article."),
        (read_choices, "a.txt", RACE | {"options": "b"}, "a.txt: questions, options, answers must"),
        (read_choices, "a.txt", RACE | {"answers": []}, ": 1 questions, 1 options, 0 answers"),
        (read_choices, "a.txt", RACE | {"answers": ["C"]}, "a.txt, question 1: Answer 'C' is not"),
        (read_choices, "a.jsonl", CHOICE | {"context": ""}, "line 1: Column context has no text."),
        (read_choices, "a.jsonl", CHOICE | {"choices": ["b", ""]}, "Choice 1 has no text (counted"),
        (read_choices, "a.jsonl", CHOICE | {"answer": None}, "Answer None is not one of the 2"),
        (read_tagged, "a.conll", "Ada\n", "a.conll, line 1: The line has one column. It needs a"),
        (read_tagged, "a.jsonl", {"text": "Ada", "tags": []}, "columns are neither tokens with"),
        (read_tagged, "a.jsonl", ADA | {"text": 3}, "Column text is 3, not a text."),
        (read_tagged, "a.jsonl", ADA | {"entities": [{"start": 0}]}, "is not an entity. It needs"),
        (read_tagged, "a.jsonl", ADA, "from 0 to 4, but the text has 3 characters."),
        (
            read_tagged,
            "a.jsonl",
            {"tokens": ["Ada"], "tags": []},
            "must be lists of the same length",
        ),
        (read_tagged, "a.jsonl", {"tokens": ["Ada"], "tags": [0]}, "0, but the file names 0"),
        (read_label_names, "a.conll", "Ada O\n", "The texts have no entities"),
        (read_similar, "a.csv", "anchor,positive\na,\n", "line 2: Column positive has no text."),
        (read_similar, "a.csv", "sentence1,sentence2,score\na,b,x\n", "'x' in column score is not"),
        (read_similar, "a.csv", "Query,QUERY,answer\na,b,c\n", "line 1: The columns 'Query'"),
        (read_similar, "a.jsonl", MIXED, "a.jsonl, line 1 has pairs. Use one kind."),
        (read_columns, "a.csv", "x,y\nc,d\n", "no column a or b. Its columns are x, y."),
        (read_scores, "a.csv", "x,y\nc,d\n", "The file has no column x or y or score."),
        (read_four_columns, "a.csv", "a,b,c,d\n", "--embedding-columns a b c d has 4 names."),
        (read_squad, "a.jsonl", SQUAD_ROW | {"answers": [3]}, "line 1 is not in SQuAD's format"),
        (read_squad, "a.json", {"data": []}, "There are no questions in "),
        (read_squad, "a.json", {"data": [3]}, "a.json is not in SQuAD's format"),
    ],
)
def test_a_fault_is_reported_with_its_location(
    read: Reader, name: str, content: str | dict[str, Any], message: str, tmp_path: Path
) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(CorpusError) as caught:
        read([write(tmp_path / name, text)])
    [error] = caught.value.args
    assert message in error
