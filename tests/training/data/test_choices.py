"""Questions of multiple choice are read from every kind of file, and packed without being split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import RACE, TINY, write
from training.data.corpus import CorpusError
from training.data.labelled.columns import Columns
from training.data.labelled.folders import race_files
from training.tasks.multiple_choice.files import (
    ChoiceText,
    choice_examples,
    groups_of,
    read_choices,
    split_choice,
    with_choice,
)


def content(questions: list[ChoiceText]) -> list[tuple[Any, ...]]:
    return [(each.context, each.question, each.choices, each.label) for each in questions]


def test_choices_are_a_list_or_a_column_each(tmp_path: Path) -> None:
    """As SWAG's files have them, and as rows of JSONL; the last of a question may be empty."""
    rows = [
        ("On stage.", "The singer", "bows.", "eats.", "swims.", "0"),
        ("He runs.", "Then he", "rests.", "walks on.", "", "1"),
    ]
    header = ("sent1", "sent2", "ending0", "ending1", "ending2", "label")
    expected = [(row[0], row[1], tuple(filter(None, row[2:5])), int(row[5])) for row in rows]
    table = write(tmp_path / "a.csv", "\n".join(",".join(row) for row in (header, *rows)))
    assert content(read_choices([table])) == expected
    records = (
        {"context": context, "question": question, "choices": choices, "answer": answer}
        for context, question, choices, answer in expected
    )
    lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
    assert content(read_choices([lines])) == expected


@pytest.mark.parametrize(
    ("answer", "label"),
    [(1, 1), ("1", 1), ("B", 1), ("walks on", 1), (0, 0), ("C", 2)],
)
def test_an_answer_is_an_index_a_letter_or_the_text(
    tmp_path: Path, answer: object, label: int
) -> None:
    record = {"context": "He", "choices": ["sings", "walks on", "reads"], "answer": answer}
    [question] = read_choices([write(tmp_path / "a.jsonl", json.dumps(record))])
    assert question.label == label


def test_choices_with_labels_of_their_own_as_in_arc(tmp_path: Path) -> None:
    record = {
        "question": "What is ice?",
        "choices": {"text": ["fire", "water"], "label": ["1", "2"]},
        "answerKey": "2",
    }
    [question] = read_choices([write(tmp_path / "a.jsonl", json.dumps(record))])
    assert content([question]) == [("What is ice?", None, ("fire", "water"), 1)]


@pytest.mark.parametrize("form", ["folders", "lines"])
def test_race_is_read_as_folders_and_as_lines(tmp_path: Path, form: str) -> None:
    folder = RACE
    if form == "lines":
        folder = tmp_path
        for level in ("high", "middle"):
            files = sorted((RACE / "dev" / level).glob("*.txt"))
            lines = [file.read_text(encoding="utf-8").strip() for file in files]
            write(tmp_path / f"dev.{level}.jsonl", "\n".join(lines))
    questions = read_choices(race_files(folder, "dev"))
    assert [question.group for question in questions] == ["high", "high", "middle", "middle"]
    assert groups_of(questions) == ["high", "middle"]
    assert [question.label for question in questions] == [1, 2, 2, 0]
    assert questions[1].question == "The historians _ their paper."
    assert questions[2].choices[2] == "Two ripe bananas."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": ["b"]}, "one choice; a question needs two or more"),
        ({"choices": "bc"}, "no choices; a question needs two or more"),
        ({"choices": ["b", " "]}, "choice 1 has no text (counted from 0)"),
        ({"answer": 2}, "answer 2 is none of 2 choices; give its index, 0 to 1, its letter, A to"),
        ({"answer": "C"}, "answer 'C' is none of 2 choices"),
        ({"answer": True}, "answer True is none of 2 choices"),
        ({"answer": None}, "answer None is none of 2 choices"),
        ({"context": ""}, "no text in column context"),
        ({"choices": ["1", "2"], "answer": "1"}, "answer '1' is both the index of a choice and"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    record = {"context": "a", "choices": ["b", "c"], "answer": 0}
    file = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, (record, {**record, **change}))))
    with pytest.raises(CorpusError) as caught:
        read_choices([file])
    assert str(caught.value).startswith(f"{file}, line 2: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "b", "a")])
def test_a_row_that_ends_before_a_choice_is_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    file = write(tmp_path / "a.csv", "context,label,a,b,c\nx,0,u,v,w\nx,0,u,v\n")
    with pytest.raises(CorpusError, match=r"line 3: the row ends before column c$"):
        read_choices([file], choices=names)


@pytest.mark.parametrize(
    ("header", "columns", "choices", "message"),
    [
        ("story,ending0,ending1,label", Columns(), (), "no column context, sent1 or question"),
        ("context,first,second", Columns(), (), "no column label or answer. Set --label-column"),
        (
            "context,first,second",
            Columns(),
            (),
            "no column choices, nor ending0, ending1, ...",
        ),
        ("context,a,b,label", Columns(), ("a", "c"), "no column c for --choice-columns"),
        ("context,a,b,label", Columns(text="t"), ("a", "b"), "no column t for --text-column"),
    ],
)
def test_missing_columns_are_named(
    tmp_path: Path, header: str, columns: Columns, choices: tuple[str, ...], message: str
) -> None:
    row = ",".join("1" for _ in header.split(","))
    file = write(tmp_path / "a.csv", f"{header}\n{row}\n")
    with pytest.raises(CorpusError) as caught:
        read_choices([file], columns, choices)
    assert message in str(caught.value)
    assert f"The columns are {', '.join(header.split(','))}" in str(caught.value)


@pytest.mark.parametrize("length", [128, 48, 16])
def test_sequences_are_pairs_cut_to_the_length(tokenizer: AlbertTokenizer, length: int) -> None:
    texts = read_choices([RACE])
    examples, num_cut = choice_examples(texts, tokenizer, length=length, truncation=True)
    num_long = 0
    for text, example in zip(texts, examples, strict=True):
        context = tokenizer.encode_plain(text.context)
        choices = [
            tokenizer.encode_plain(with_choice(text.question, choice)) for choice in text.choices
        ]
        pairs = []
        for choice in choices:
            num_first, num_second = split_choice(len(context), len(choice), length)
            second = choice.slice(len(choice) - num_second, len(choice))
            pairs.append(tokenizer.build(context.slice(0, num_first), second))
        ours = example.sequences(tokenizer)
        assert [(each.ids, each.types) for each in ours] == [
            (pair.ids, pair.types) for pair in pairs
        ]
        assert example.lengths == [len(each.ids) for each in ours]
        num_long += len(context) + max(map(len, choices)) + 3 > length
    assert num_cut == num_long


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (None, "cars"),
        ("It was closed to", "It was closed to cars"),
        ("It was closed to _ in 1988.", "It was closed to cars in 1988."),
        ("Closed to ___?", "Closed to cars?"),
        ("_ and _", "cars and cars"),
        ("Closed to_.", "Closed tocars."),  # as in RACE, and by the original's `replace`
    ],
)
def test_a_choice_stands_in_the_blank_or_at_the_end(question: str | None, expected: str) -> None:
    assert with_choice(question, "cars") == expected
    assert with_choice(question, r"\1") == expected.replace("cars", r"\1")


@pytest.mark.parametrize(
    ("num_context", "num_choice", "max_positions", "expected"),
    [
        (10, 5, 18, (10, 5)),  # they fit
        (100, 5, 18, (10, 5)),  # the context is cut
        (2, 100, 18, (2, 13)),  # the choice has what the context leaves
        (100, 100, 18, (8, 7)),  # half of few positions are the choice's
        (1000, 1000, 512, (381, 128)),  # of many, 128 tokens
        (0, 600, 512, (0, 509)),
    ],
)
def test_the_context_is_cut_first(
    num_context: int, num_choice: int, max_positions: int, expected: tuple[int, int]
) -> None:
    assert split_choice(num_context, num_choice, max_positions) == expected


def test_texts_that_are_too_long_are_listed_without_truncation(tokenizer: AlbertTokenizer) -> None:
    texts = read_choices([RACE / "dev"])
    with pytest.raises(CorpusError) as caught:
        choice_examples(texts, tokenizer, length=32, truncation=False)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(texts)
    assert lines[0].endswith("6.txt, question 1: over 32 tokens; --truncation truncates such texts")


@pytest.fixture
def config(tokenizer: AlbertTokenizer) -> AlbertConfig:
    values = {**TINY.to_hf(), "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 128}
    return AlbertConfig.from_hf(values)
