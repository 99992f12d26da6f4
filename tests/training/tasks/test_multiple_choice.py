"""Multiple-choice questions are read in every format, truncated, and built into sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import RACE, write
from training.data.corpus import CorpusError
from training.data.labelled.columns import Columns
from training.data.labelled.folders import race_files
from training.tasks.multiple_choice.files import (
    ChoiceExample,
    ChoiceText,
    choice_examples,
    groups_of,
    read_choices,
    split_choice,
    with_choice,
)


def write_records(folder: Path, *records: dict[str, Any]) -> Path:
    return write(folder / "a.jsonl", "\n".join(map(json.dumps, records)))


def content(questions: list[ChoiceText]) -> list[tuple[Any, ...]]:
    return [(q.context, q.question, q.choices, q.label) for q in questions]


def test_choices_are_a_list_or_columns(tmp_path: Path) -> None:
    """The formats are SWAG, JSON lines and ARC. The last choices of a row may be empty."""
    rows = [
        ("On stage.", "The singer", "bows.", "eats.", "swims.", "0"),
        ("He runs.", "Then he", "rests.", "walks on.", "", "1"),
    ]
    header = ("sent1", "sent2", "ending0", "ending1", "ending2", "label")
    expected = [(row[0], row[1], tuple(filter(None, row[2:5])), int(row[5])) for row in rows]
    table = write(tmp_path / "a.csv", "\n".join(",".join(row) for row in (header, *rows)))
    assert content(read_choices([table])) == expected
    names = ("context", "question", "choices", "answer")
    records = [dict(zip(names, question, strict=True)) for question in expected]
    assert content(read_choices([write_records(tmp_path, *records)])) == expected
    choices = {"text": ["fire", "water"], "label": ["1", "2"]}
    arc = {"question": "What is ice?", "choices": choices, "answerKey": "2"}
    [question] = content(read_choices([write_records(tmp_path, arc)]))
    assert question == ("What is ice?", None, ("fire", "water"), 1)


def test_an_answer_is_an_index_a_letter_or_the_text(tmp_path: Path) -> None:
    choices, numbers = ["sings", "walks on", "AB"], ["1", "2"]
    answers = [(choices, 1, 1), (choices, "1", 1), (choices, "B", 1), (choices, "walks on", 1)]
    answers += [(choices, 0, 0), (choices, "C", 2), (choices, "AB", 2)]
    answers += [(numbers, 1, 1), (["0", "1"], "1", 1)]
    records = [{"context": "He", "choices": names, "answer": value} for names, value, _ in answers]
    questions = read_choices([write_records(tmp_path, *records)])
    assert [question.label for question in questions] == [label for *_, label in answers]


RACE_FIELDS = ("article", "questions", "options", "answers")


def test_race_is_read_from_folders_and_from_json_lines(tmp_path: Path) -> None:
    for level in ("high", "middle"):
        files = sorted((RACE / "dev" / level).glob("*.txt"))
        records = [json.loads(file.read_bytes()) for file in files]
        lines = [json.dumps({name: record[name] for name in RACE_FIELDS}) for record in records]
        write(tmp_path / f"dev.{level}.jsonl", "\n".join(lines))
    questions = read_choices(race_files(RACE, "dev"))
    assert content(read_choices(race_files(tmp_path, "dev"))) == content(questions)
    assert [question.group for question in questions] == ["high", "high", "middle", "middle"]
    assert groups_of(questions) == ["high", "middle"]
    assert [question.label for question in questions] == [1, 2, 2, 0]
    assert questions[1].question == "The historians _ their paper."
    assert questions[2].choices[2] == "Two ripe bananas."


def test_all_faults_of_records_are_listed(tmp_path: Path) -> None:
    record = {"context": "a", "choices": ["b", "c"], "answer": 0}
    faults: list[tuple[dict[str, Any], str]] = [
        ({"choices": ["b"]}, "The question has one choice. It needs two or more."),
        ({"answer": 2}, "is not one of the 2 choices. Use an index, 0 to 1, a letter, A to B, or"),
        ({"answer": "C"}, "Answer 'C' is not one of the 2 choices"),
        ({"choices": ["1", "2"], "answer": "1"}, "Answer '1' is the index of one choice and the"),
        ({"choices": ["1", "2"], "answer": "2"}, "Answer '2' is not one of the 2 choices"),
        ({"choices": ["b", "b"], "answer": "b"}, "Answer 'b' is not one of the 2 choices"),
    ]
    records = [{**record, **change} for change, _ in faults]
    file = write_records(tmp_path, record, *records)
    with pytest.raises(CorpusError) as caught:
        read_choices([file])
    for index, (error, (_, message)) in enumerate(zip(caught.value.args, faults, strict=True)):
        assert error.startswith(f"{file}, line {index + 2}: ")
        assert message in error
    with pytest.raises(CorpusError, match=r"^Multiple choice has one right choice\. Set only one"):
        read_choices([file], Columns(separator=","))


def test_sequences_are_pairs_truncated_to_the_length(tokenizer: AlbertTokenizer) -> None:
    """The first tokens of the context remain, and the last tokens of question and choice.

    Of a long question and choice, 128 tokens remain, or half of a short length.
    """
    context, *choices = (
        np.arange(*bounds, dtype=np.int32) for bounds in ((10, 20), (30, 34), (40, 52))
    )
    example = ChoiceExample(context=context, choices=tuple(choices), target=1, length=16)
    first, second = example.sequences(tokenizer)
    assert first.ids == [2, *range(10, 19), 3, *range(30, 34), 3]
    assert second.ids == [2, *range(10, 17), 3, *range(46, 52), 3]
    assert first.types == [0] * 11 + [1] * 5
    assert example.lengths == [16, 16]
    assert split_choice(600, 600, 512) == (381, 128)


def test_texts_that_are_too_long_are_listed_without_truncation(tokenizer: AlbertTokenizer) -> None:
    texts = read_choices([RACE / "dev"])
    examples, _ = choice_examples(texts, tokenizer, length=512, truncation=False)
    for text, example in zip(texts, examples, strict=True):
        assert example.context.tolist() == tokenizer.encode_plain(text.context).ids
    longest = max(max(example.lengths) for example in examples)
    assert choice_examples(texts, tokenizer, length=longest, truncation=False)[1] == 0
    with pytest.raises(CorpusError, match=f"more than {longest - 1} tokens. Use --trunc"):
        choice_examples(texts, tokenizer, length=longest - 1, truncation=False)


def test_a_choice_replaces_the_blank_or_follows_the_question() -> None:
    for question, expected in (
        (None, "cars"),
        ("It was closed to", "It was closed to cars"),
        ("Closed to ___?", "Closed to cars?"),
        ("_ and _", "cars and cars"),
        ("Closed to_.", "Closed tocars."),  # as in RACE and the original code
    ):
        assert with_choice(question, "cars") == expected
    assert with_choice("Closed to _", r"\1") == r"Closed to \1"
