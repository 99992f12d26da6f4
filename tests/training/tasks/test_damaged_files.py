"""Data files of each task with a fault are rejected, with the location of the fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    problem: ProblemType, columns: Columns = COMMON_COLUMNS, **options: Any
) -> Reader:
    """Return a reader of text classification."""
    return lambda files: read_splits(
        {"training": files}, problem=problem, columns=columns, **options
    )


SINGLE: Final = classification("single_label_classification")
MULTI: Final = classification("multi_label_classification")
TWO_LABELS: Final = Columns(indicators=("sad", "glad"))
RACE: Final = {"article": "a", "options": [["b", "c"]], "questions": ["?"], "answers": ["A"]}
CHOICE: Final = {"context": "a", "choices": ["b", "c"], "answer": 0}
SQUAD_ROW: Final = {"id": "1", "context": "a", "question": "?", "answers": []}
SPAN: Final = {"start": 0, "end": 1, "label": "X"}


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [
        (SINGLE, "a.jsonl", {"text": 5.5, "label": ["a"]}, "label contains lists. If texts have"),
        (SINGLE, "a.jsonl", {"text": ["x"], "label": "a"}, "line 1: ['x'] is not a text."),
        (SINGLE, "a.jsonl", {"text": "x", "label": {"a": 1}}, "label contains nested values."),
        (MULTI, "a.jsonl", {"text": "x", "label": None}, "line 1: Column label has no value."),
        (
            MULTI,
            "a.jsonl",
            {"text": "x", "label": "a"},
            "label does not contain lists. Set --label",
        ),
        (
            classification("multi_label_classification", TWO_LABELS),
            "a.csv",
            "text,sad,glad\nx,1,yes\n",
            "line 2: column glad contains 'yes', not 0 or 1.",
        ),
        (
            classification("multi_label_classification", TWO_LABELS, label_names=["sad", "mad"]),
            "a.csv",
            "text,sad,glad\nx,1,0\n",
            "--label-column sad glad does not match the labels sad, mad.",
        ),
        (
            classification("single_label_classification", TWO_LABELS),
            "a.csv",
            "text,sad,glad\nx,1,0\n",
            "several columns of --label-column, require multi_label_classification.",
        ),
        (
            classification("regression", label_names=["a", "b"]),
            "a.csv",
            "text,label\nx,1\n",
            "A regression has one score, but --labels has 2 names.",
        ),
        (read_choices, "a.txt", "{", "a.txt is not JSON, which a .txt file of RACE must be: "),
        (read_choices, "a.txt", {"text": "a"}, "a.txt has no article, which a passage of RACE"),
        (read_choices, "a.txt", RACE | {"article": " "}, "a.txt: The passage has no article."),
        (read_choices, "a.txt", RACE | {"options": "b"}, "a.txt: questions, options, answers must"),
        (
            read_choices,
            "a.txt",
            RACE | {"answers": []},
            "differ: 1 questions, 1 options, 0 answers",
        ),
        (read_choices, "a.jsonl", CHOICE | {"context": ""}, "line 1: Column context has no text."),
        (read_choices, "a.jsonl", CHOICE | {"choices": ["b", ""]}, "Choice 1 has no text (counted"),
        (read_choices, "a.jsonl", CHOICE | {"answer": None}, "Answer None is not one of the 2"),
        (read_tagged, "a.conll", "Ada\n", "a.conll, line 1: The line has one column. It needs a"),
        (
            read_tagged,
            "a.jsonl",
            {"text": "Ada", "tags": []},
            "The columns are neither tokens with",
        ),
        (read_tagged, "a.jsonl", {"text": 3, "entities": []}, "Column text is 3, not a text."),
        (
            read_tagged,
            "a.jsonl",
            {"text": "Ada", "entities": [{"start": 0}]},
            "is not an entity. It",
        ),
        (
            read_tagged,
            "a.jsonl",
            {"text": "Ada", "entities": [SPAN | {"end": 4}]},
            "line 1: An entity is from 0 to 4, but the text has 3 characters.",
        ),
        (
            read_tagged,
            "a.jsonl",
            {"tokens": ["Ada"], "tags": []},
            "must be lists of the same length",
        ),
        (
            read_tagged,
            "a.jsonl",
            {"tokens": ["Ada"], "tags": [7]},
            "number 7, but the file names 0",
        ),
        (read_similar, "a.csv", "anchor,positive\na,\n", "line 2: Column positive has no text."),
        (
            read_similar,
            "a.csv",
            "sentence1,sentence2,score\na,b,x\n",
            "'x' in column score is not a",
        ),
        (
            read_similar,
            "a.csv",
            "Query,QUERY,answer\na,b,c\n",
            "a.csv, line 1: The columns 'Query'",
        ),
        (read_squad, "a.jsonl", SQUAD_ROW | {"answers": [3]}, "line 1 is not in SQuAD's format"),
        (read_squad, "a.json", {"data": []}, "There are no questions in "),
    ],
)
def test_a_fault_is_reported_with_its_location(
    read: Reader, name: str, content: str | dict[str, Any], message: str, tmp_path: Path
) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(CorpusError) as caught:
        read([write(tmp_path / name, text)])
    assert message in str(caught.value)


def test_texts_without_entities_have_no_labels(tmp_path: Path) -> None:
    texts = read_tagged([write(tmp_path / "a.conll", "Ada O\n")])
    with pytest.raises(CorpusError, match="The texts have no entities"):
        label_names(texts)
