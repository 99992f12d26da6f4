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
from training.tasks.token_classification.files import (
    Entity,
    TaggedText,
    label_names,
    read_tagged,
    token_examples,
    token_task,
    word_tags,
)

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
        write_conll(tmp_path / "bilou.conll", ["B-PER", "L-PER", "O", "O", "U-LOC", "O"]),
        write_conll(tmp_path / "bmes.conll", ["B-PER", "E-PER", "O", "O", "S-LOC", "O"]),
    ]
    for file in files:
        [text] = read_tagged([file])
        assert (text.text, text.entities) == (TEXT, ENTITIES), file
    assert len(read_tagged([tmp_path])) == len(files)
    assert label_names(read_tagged(files)) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def test_comments_are_no_words_and_tabs_alone_divide_columns(tmp_path: Path) -> None:
    file = tmp_path / "a.conll"
    lines = ["# sent_id = 7", "# text = In Rio de Janeiro", "In\tO", "Rio de Janeiro\tB-LOC", ""]
    lines += ["# id 8 domain=en", "# O", "#ada B-PER", "5\u00a0000 O", "\u00a0", "x\tE\tO"]
    file.write_text("\r\n".join(lines), encoding="utf-8")
    texts = read_tagged([file])
    assert [text.text for text in texts] == ["In Rio de Janeiro", "# #ada 5\u00a0000", "x"]
    words = [[text.text[slice(*word)] for word in text.words] for text in texts]
    assert words == [["In", "Rio de Janeiro"], ["#", "#ada", "5\u00a0000"], ["x"]]
    assert texts[0].entities == (Entity(3, 17, "LOC"),)


def test_middles_and_ends_of_bmes_are_no_labels(tmp_path: Path) -> None:
    tags = ["B-PER", "M-PER", "M-PER", "E-PER", "S-LOC", "O"]
    [text] = read_tagged([write_conll(tmp_path / "a.conll", tags)])
    assert text.entities == (Entity(0, 16, "PER"), Entity(17, 23, "LOC"))


@pytest.mark.parametrize(
    "tag", ["PER-B", "B_PER", "b-per", "I:PER", "o", "B-", "_", "7", "PER", "SpaceAfter=No"]
)
def test_a_tag_of_no_scheme_is_refused_with_its_line(tmp_path: Path, tag: str) -> None:
    """Labels without a prefix are one only where no tag has one."""
    file = write_conll(tmp_path / "a.conll", [*BIO[:4], tag, tag])
    with pytest.raises(CorpusError, match=f"line 7: the tag {tag!r} is in none .*\\(2 words have"):
        read_tagged([file])
    plain = write_conll(tmp_path / "b.conll", ["PER", "PER", "O", "O", "street-art", "O"])
    assert [entity.label for entity in read_tagged([plain])[0].entities] == ["PER", "street-art"]


def test_offsets_are_held_against_the_text_of_their_entity(tmp_path: Path, capsys: Capture) -> None:
    """Those of JavaScript count UTF-16; without a text to find, they are refused."""
    text = "👍🏽 Ada met Ada in Rio, 👍🏽 said Ada"

    def entity(part: str, place: int, **more: Any) -> dict[str, Any]:
        start = len(text[:place].encode("utf-16-le")) // 2
        return {"start": start, "end": start + len(part), "label": "X", **more}

    places = [text.index("Ada met"), text.index("Ada in"), text.index("Rio")]
    parts = list(zip(["Ada", "Ada", "Rio"], places, strict=True))
    rows = [entity(part, place, text=part) for part, place in parts]
    file = write_jsonl(tmp_path / "a.jsonl", {"text": text, "entities": rows})
    [read] = read_tagged([file])
    assert [(one.start, text[one.start : one.end]) for one in read.entities] == [
        (place, part) for part, place in parts
    ]
    assert f"located by it: 3, at {file}, line 1" in capsys.readouterr().out
    for row, message in (
        (entity("Rio", places[2]), "divides words, but none if .* UTF-16"),
        (entity("Rio", places[2], text="Rome"), "not 'Rome', which occurs 0 times"),
    ):
        file = write_jsonl(tmp_path / "a.jsonl", {"text": text, "entities": [row]})
        with pytest.raises(CorpusError, match=f"line 1: .*{message}"):
            read_tagged([file])


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
    laid = token_task(tokenizer, 512).split(text.text)
    tags, _ = word_tags(laid, text)
    targets = [target for example in examples for target in example.target if target != IGNORED]
    assert len(examples) > 1
    assert sorted(targets) == sorted(map(names.index, tags))
    assert {"B-PER", "I-PER"} <= set(tags)
    for example in examples:
        assert len(example.target) == len(example.ids) <= 40
        assert example.target[0] == example.target[-1] == IGNORED
