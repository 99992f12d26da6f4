"""Every format of tagged texts gives the same entities; faults are counted and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import write
from training.data.corpus import CorpusError
from training.data.examples import IGNORED
from training.tasks.token_classification.files import (
    Entity,
    TaggedText,
    label_names,
    read_tagged,
    token_examples,
)

Capture = pytest.CaptureFixture[str]
WORDS = ["Ada", "King", "came", "to", "Vienna", "."]
BIO = ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]
TEXT = "Ada King came to Vienna ."
ENTITIES = (Entity(0, 8, "PER"), Entity(17, 23, "LOC"))
SPANS = [{"start": start, "end": end, "label": label} for start, end, label in ENTITIES]


def write_jsonl(file: Path, row: Any) -> Path:
    return write(file, json.dumps(row))


def write_parquet(file: Path) -> Path:
    names = sorted(set(BIO))
    inner = {"names": names, "_type": "ClassLabel"}
    features = {"ner_tags": {"feature": inner, "_type": "List"}}
    table = pa.table({"tokens": [WORDS], "ner_tags": [[names.index(tag) for tag in BIO]]})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), file)
    return file


def write_conll(file: Path, tags: str) -> Path:
    lines = [f"{word} NN {tag}" for word, tag in zip(WORDS, tags.split(), strict=True)]
    return write(file, "\n".join(["-DOCSTART- -X- O", "", *lines, ""]))


def test_every_format_gives_the_same_entities(tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / "a.jsonl", {"tokens": WORDS, "ner_tags": BIO}),
        write_jsonl(tmp_path / "b.jsonl", {"tokens": WORDS, "tags": BIO}),
        write_jsonl(tmp_path / "c.jsonl", {"text": TEXT, "entities": SPANS}),
        write_parquet(tmp_path / "d.parquet"),
        write_conll(tmp_path / "bio.conll", " ".join(BIO)),
        write_conll(tmp_path / "io.txt", "I-PER I-PER O O I-LOC O"),
        write_conll(tmp_path / "bioes.tsv", "B-PER E-PER O O S-LOC O"),
        write_conll(tmp_path / "bilou.conll", "B-PER L-PER O O U-LOC O"),
    ]
    for file in files:
        [text] = read_tagged([file])
        assert (text.text, text.entities) == (TEXT, ENTITIES), file
    assert len(read_tagged([tmp_path])) == len(files)
    assert label_names(read_tagged(files)) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    bmes = write_conll(tmp_path / "bmes.conll", "B-PER M-PER M-PER E-PER S-LOC O")
    assert read_tagged([bmes])[0].entities == (Entity(0, 16, "PER"), ENTITIES[1])


def test_comments_are_not_words_and_only_tabs_divide_columns(tmp_path: Path) -> None:
    lines = ["# sent_id = 7", "# text = In Rio de Janeiro", "In\tO", "Rio de Janeiro\tB-LOC", ""]
    lines += ["# id 8 domain=en", "# O", "#ada B-PER", "5\u00a0000 O", "\u00a0", "x\tE\tO"]
    texts = read_tagged([write(tmp_path / "a.conll", "\r\n".join(lines))])
    assert [text.text for text in texts] == ["In Rio de Janeiro", "# #ada 5\u00a0000", "x"]
    words = [[text.text[slice(*word)] for word in text.words] for text in texts]
    assert words == [["In", "Rio de Janeiro"], ["#", "#ada", "5\u00a0000"], ["x"]]
    assert texts[0].entities == (Entity(3, 17, "LOC"),)


@pytest.mark.parametrize("tag", ["PER-B", "B_PER", "b-per", "_"])
def test_the_error_for_a_tag_of_no_scheme_names_its_line(tmp_path: Path, tag: str) -> None:
    """Labels without a prefix are accepted if no tag has one."""
    file = write_conll(tmp_path / "a.conll", f"B-PER I-PER O O {tag} {tag}")
    with pytest.raises(CorpusError, match=f"line 7: Tag {tag!r} is not in any .*\\(2 words have"):
        read_tagged([file])
    plain = write_conll(tmp_path / "b.conll", "PER PER O O street-art O")
    assert [entity.label for entity in read_tagged([plain])[0].entities] == ["PER", "street-art"]


def test_offsets_are_corrected_by_the_text_of_their_entity(tmp_path: Path, capsys: Capture) -> None:
    """JavaScript's offsets count UTF-16. Without a text that corrects them, they are rejected."""
    text = "👍🏽 Ada met Ada in Rio, 👍🏽 said Ada"

    def entity(name: str, start: int, **fields: Any) -> dict[str, Any]:
        offset = len(text[:start].encode("utf-16-le")) // 2
        return {"start": offset, "end": offset + len(name), "label": "X", **fields}

    starts = [text.index("Ada met"), text.index("Ada in"), text.index("Rio")]
    entities = list(zip(starts, ["Ada", "Ada", "Rio"], strict=True))
    rows = [entity(name, start, text=name) for start, name in entities]
    file = write_jsonl(tmp_path / "a.jsonl", {"text": text, "entities": rows})
    [tagged] = read_tagged([file])
    assert [(start, text[start:end]) for start, end, _ in tagged.entities] == entities
    assert f"not at their offsets (corrected): {file}, line 1" in capsys.readouterr().out
    for row, message in (
        (entity("Rio", starts[2]), "inside a word, .* UTF-16"),
        (entity("Rio", starts[2], text="Rome"), "not 'Rome', which occurs 0 times"),
    ):
        file = write_jsonl(tmp_path / "a.jsonl", {"text": text, "entities": [row]})
        with pytest.raises(CorpusError, match=f"line 1: .*{message}"):
            read_tagged([file])


def test_broken_tags_and_overlaps_are_reported(tmp_path: Path, capsys: Capture) -> None:
    """Adjacent entities do not overlap. White space around an entity is removed."""
    file = write_conll(tmp_path / "a.conll", "B-PER O I-PER O B-LOC O")
    assert read_tagged([file])[0].entities[1] == Entity(9, 13, "PER")
    line = f"1 tags that break their scheme (used unchanged): {file}, line 5"
    assert line in capsys.readouterr().out
    read_tagged([write_conll(file, "B-PER E-PER I-PER O S-LOC I-LOC")])
    assert f"2 tags that break their scheme (used unchanged): {file}, line 5; {file}, line 8" in (
        capsys.readouterr().out
    )
    read_tagged([write_conll(file, "I-PER O O O I-LOC O")])
    assert "break their scheme" not in capsys.readouterr().out
    spans = [SPANS[1], {"start": 0, "end": 3, "label": "LOC"}, SPANS[0]]
    spans += [{"start": 8, "end": 11, "label": "VERB"}, {"start": 11, "end": 14, "label": "TENSE"}]
    spans += [{"start": 24, "end": 25, "label": "END"}]
    file = write_jsonl(tmp_path / "b.jsonl", {"text": TEXT, "entities": spans})
    parts = (Entity(9, 11, "VERB"), Entity(11, 13, "TENSE"))
    expected = (ENTITIES[0], *parts, ENTITIES[1], Entity(24, 25, "END"))
    assert read_tagged([file])[0].entities == expected
    line = f"1 entities that overlap another entity (ignored): {file}, line 1\n"
    assert line in capsys.readouterr().out


def test_the_first_token_of_a_word_has_its_tag_in_one_window(
    tokenizer: AlbertTokenizer, capsys: Capture
) -> None:
    """An entity that splits words consists of the words that start in it."""
    entities = (
        Entity(1, 9, "PER"),
        Entity(18, 24, "LOC"),
        Entity(25, 26, "LOC"),
        Entity(29, 31, "PER"),
    )
    text = TaggedText(text=f"({TEXT}) " * 9, entities=entities, location="a, line 1")
    names = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    blank = TaggedText(text=" ", entities=())
    examples = token_examples([text, blank], tokenizer, names, length=40)
    line = "1 entities that do not begin and end with words (aligned with words): a, line 1"
    assert line in capsys.readouterr().out
    targets = [target for example in examples for target in example.target if target != IGNORED]
    assert len(examples) > 1
    assert sorted(target for target in targets if target) == [1, 1, 3, 3, 4]
    assert len(targets) == 9 * 8  # words and punctuation
    for example in examples:
        assert len(example.target) == len(example.ids) <= 40
        assert example.target[0] == example.target[-1] == IGNORED
