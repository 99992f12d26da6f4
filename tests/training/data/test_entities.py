"""Texts with entities in every form are the same texts; faults are counted, and told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import REPOSITORY
from training.data.corpus import CorpusError
from training.data.examples import IGNORED
from training.data.labelled.entities import Entity, TaggedText, label_names, read_tagged
from training.data.tokens import token_examples, token_task, word_tags

Capture = pytest.CaptureFixture[str]
WORDS = ["Ada", "King", "came", "to", "Vienna", "."]
BIO = ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]
TEXT = "Ada King came to Vienna ."
ENTITIES = (Entity(0, 8, "PER"), Entity(17, 23, "LOC"))
SPANS = [{"start": start, "end": end, "label": label} for start, end, label in ENTITIES]


def write_jsonl(file: Path, *rows: Any) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def write_parquet(file: Path) -> Path:
    names = sorted(set(BIO))
    inner = {"names": names, "_type": "ClassLabel"}
    features = {"ner_tags": {"feature": inner, "_type": "List"}}
    table = pa.table({"tokens": [WORDS], "ner_tags": [[names.index(tag) for tag in BIO]]})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), file)
    return file


def write_conll(file: Path, tags: list[str]) -> Path:
    lines = [f"{word} NN {tag}" for word, tag in zip(WORDS, tags, strict=True)]
    file.write_text("\n".join(["-DOCSTART- -X- O", "", *lines, ""]), encoding="utf-8")
    return file


def test_every_form_has_the_same_entities(tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / "a.jsonl", {"tokens": WORDS, "ner_tags": BIO}),
        write_jsonl(tmp_path / "b.jsonl", {"tokens": WORDS, "tags": BIO}),
        write_jsonl(tmp_path / "c.jsonl", {"text": TEXT, "entities": SPANS}),
        write_parquet(tmp_path / "d.parquet"),
        write_conll(tmp_path / "bio.conll", BIO),
        write_conll(tmp_path / "io.txt", ["I-PER", "I-PER", "O", "O", "I-LOC", "O"]),
        write_conll(tmp_path / "bioes.tsv", ["B-PER", "E-PER", "O", "O", "S-LOC", "O"]),
    ]
    for file in files:
        [text] = read_tagged([file])
        assert (text.text, text.entities) == (TEXT, ENTITIES), file
    assert len(read_tagged([tmp_path])) == len(files)
    assert label_names(read_tagged(files)) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def test_tags_that_break_the_scheme_and_overlaps_are_told(tmp_path: Path, capsys: Capture) -> None:
    file = write_conll(tmp_path / "a.conll", ["B-PER", "O", "I-PER", "O", "B-LOC", "O"])
    spans = [*SPANS, {"start": 4, "end": 8, "label": "LOC"}]
    other = write_jsonl(tmp_path / "b.jsonl", {"text": TEXT, "entities": spans})
    assert read_tagged([file])[0].entities[1] == Entity(9, 13, "PER")
    assert f"read as they stand: 1, at {file}, line 5" in capsys.readouterr().out
    assert read_tagged([other])[0].entities == ENTITIES
    assert f"and are left out: 1, at {other}, line 1" in capsys.readouterr().out


def outline(ticket: TaggedText) -> str:
    """The words of a ticket without its entities."""
    text = ticket.text
    for start, end, label in reversed(ticket.entities):
        text = f"{text[:start]}{{{label}}}{text[end:]}"
    return text


def test_the_example_writes_tickets_of_which_the_test_has_templates_of_its_own(
    tmp_path: Path,
) -> None:
    pytest.importorskip("faker")
    script = REPOSITORY / "examples" / "support_tickets.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    outlines = {}
    for split, count in (("train", 2000), ("test", 500)):
        tickets = read_tagged([tmp_path / f"{split}.jsonl"])
        assert len(tickets) == count
        assert len(label_names(tickets)) == 1 + 2 * 9
        outlines[split] = {outline(ticket) for ticket in tickets}
    assert len(outlines["train"]) == 12
    assert outlines["train"].isdisjoint(outlines["test"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": WORDS}, r"line 1: neither tokens with ner_tags.*columns are tokens"),
        ({"tokens": WORDS, "tags": ["O"]}, "must be lists of the same length"),
        ({"tokens": ["a"], "tags": [3]}, "holds the number 3, and the file names 0 classes"),
        ({"text": "a b", "entities": [{"start": 0}]}, "needs start, end and label"),
        (
            {"text": "a b", "entities": [{"start": 1, "end": 2, "label": "X"}]},
            "no text from 1 to 2",
        ),
    ],
)
def test_a_row_in_no_form_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_tagged([write_jsonl(tmp_path / "a.jsonl", row)])


def test_a_word_without_a_tag_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("Ada\n")
    with pytest.raises(CorpusError, match="line 1: one column"):
        read_tagged([tmp_path / "a.conll"])


def test_a_words_first_token_has_its_tag_in_one_window(
    tokenizer: AlbertTokenizer, capsys: Capture
) -> None:
    text = TaggedText(text=f"({TEXT}) " * 9, entities=(Entity(1, 9, "PER"), Entity(19, 23, "LOC")))
    names = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    examples = token_examples([text], tokenizer, names, length=40)
    assert "entities that fit no words" in capsys.readouterr().out  # "ienna" of "Vienna"
    laid = token_task(tokenizer, 512).lay(text.text)
    tags, _ = word_tags(laid, text)
    targets = [target for example in examples for target in example.target if target != IGNORED]
    assert len(examples) > 1
    assert sorted(targets) == sorted(map(names.index, tags))
    assert {"B-PER", "I-PER"} <= set(tags)
    for example in examples:
        assert len(example.target) == len(example.ids) <= 40
        assert example.target[0] == example.target[-1] == IGNORED
