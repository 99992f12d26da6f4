"""Text is read as far as it is needed, and samples of it have the forms that the tasks know."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest

from albert_serve.bundle.manifest import TaskEntry
from albert_serve.bundle.weights import TaskName
from albert_serve.tokenizer import AlbertTokenizer
from export.source import Source, read_source
from tests.export.conftest import WIKI
from training.data.corpus import read_documents, split_sentences
from training.data.preparation import prepare
from training.errors import EvaluationError
from training.evaluation import samples as samples_module
from training.evaluation.real_text import RealData, read_real_text
from training.evaluation.samples import Sample

SQUAD = WIKI.with_name("squad.json")
CLS, SEP, MASK = 2, 3, 4


@pytest.fixture
def source(real_checkpoint: Path) -> Source:
    return read_source(real_checkpoint)


@pytest.fixture
def tokenizer(real_checkpoint: Path) -> AlbertTokenizer:
    return AlbertTokenizer.from_file(real_checkpoint / "tokenizer.json")


def draw_samples(source: Source, tokenizer: AlbertTokenizer, data: RealData) -> dict[str, Sample]:
    return samples_module.draw_samples(source.config, source.tasks, tokenizer, data)


def only(source: Source, task: TaskName, entry: TaskEntry | None = None) -> Source:
    return replace(source, tasks={task: entry or source.tasks[task]})


def draw(source: Source, tokenizer: AlbertTokenizer, task: TaskName, data: RealData) -> Sample:
    return draw_samples(only(source, task), tokenizer, data)[task]


def text(*files: Path) -> RealData:
    return RealData(text=files)


def documents(tokenizer: AlbertTokenizer, file: Path) -> list[str]:
    """The ids of each document, as a text that others can be looked for in."""
    return [
        spelled([i for each in split_sentences(text) for i in tokenizer.encode_plain(each).ids])
        for text in read_documents([file])
    ]


def spelled(ids: Sequence[int]) -> str:
    return f" {' '.join(map(str, ids))} "


def segments(ids: list[int]) -> list[list[int]]:
    """The tokens between [CLS] and the [SEP]s."""
    assert ids[0] == CLS
    assert ids[-1] == SEP
    bounds = [0, *(place for place, each in enumerate(ids) if each == SEP)]
    return [ids[begin + 1 : end] for begin, end in pairwise(bounds)]


def predictions(sample: Sample) -> int:
    return sum(len(item.rights or ()) for item in sample.items)


def tokens(sample: Sample) -> int:
    return sum(item.num_tokens for item in sample.items)


def test_masked_tokens_are_those_of_the_text(source: Source, tokenizer: AlbertTokenizer) -> None:
    known = documents(tokenizer, WIKI)
    sample = draw_samples(source, tokenizer, text(WIKI))["fill-mask"]
    for item in sample.items:
        [encoder_input] = item.inputs
        assert encoder_input.rows is not None
        assert [
            place for place, each in enumerate(encoder_input.ids) if each == MASK
        ] == encoder_input.rows
        whole = list(encoder_input.ids)
        for row, right in zip(encoder_input.rows, item.rights or [], strict=True):
            whole[row] = right
        for segment in segments(whole):
            assert any(spelled(segment) in document for document in known)
        assert encoder_input.types == [0] * (whole.index(SEP) + 1) + [1] * (
            len(whole) - whole.index(SEP) - 1
        )
        assert len(whole) <= 64
    assert 0.12 < predictions(sample) / tokens(sample) < 0.16


def test_pairs_are_labelled_by_their_order_in_the_text(
    source: Source, tokenizer: AlbertTokenizer
) -> None:
    known = documents(tokenizer, WIKI)
    labels = []
    for item in draw(source, tokenizer, "sentence-order", text(WIKI)).items:
        first, second = (spelled(segment) for segment in segments(item.inputs[0].ids))
        candidates = [each for each in known if each.count(first) == each.count(second) == 1]
        if len(candidates) == 1:  # else it is no proof
            assert item.rights == [int(candidates[0].index(first) > candidates[0].index(second))]
            labels += item.rights
        assert item.inputs[0].rows == [0]
    assert len(labels) > 500
    assert 0.4 < sum(labels) / len(labels) < 0.6


def test_samples_are_deterministic(source: Source, tokenizer: AlbertTokenizer) -> None:
    data = RealData(text=(WIKI,), questions=(SQUAD,))
    samples = [
        {
            task: (sample.files, [(item.inputs, item.rights) for item in sample.items])
            for task, sample in draw_samples(source, tokenizer, data).items()
        }
        for _ in range(2)
    ]
    assert samples[0] == samples[1]


def test_a_short_text_is_gone_through_again(
    source: Source, tokenizer: AlbertTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("The school is in the city. Many people came to play music.")
    samples = draw_samples(source, tokenizer, text(file))
    assert len({tuple(item.inputs[0].ids) for item in samples["fill-mask"].items}) > 1
    assert {item.rights[0] for item in samples["sentence-order"].items if item.rights} == {0, 1}
    assert len(samples["sentence-order"].items) <= 8


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("sentence-order", "nothing to ask sentence-order"),
        ("question-answering", "nothing to ask question-answering"),
    ],
)
def test_a_text_that_gives_a_task_nothing(
    source: Source, tokenizer: AlbertTokenizer, tmp_path: Path, task: TaskName, message: str
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("One sentence.\n\nAnd another.")
    with pytest.raises(EvaluationError, match=f"short.txt: {message}"):
        draw(source, tokenizer, task, text(file))


def rows(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(["sentence\tlabel", *lines]), encoding="utf-8")
    return file


def test_texts_too_long_are_left_out_and_counted(
    source: Source, tokenizer: AlbertTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = rows(tmp_path / "dev.tsv", f"{'good ' * 90}\t1", "a bad war\t0", f"{'bad ' * 90}\t0")
    data = RealData(text=(), labelled=(file,))
    with caplog.at_level(logging.WARNING):
        assert len(draw(source, tokenizer, "text-classification", data).items) == 1
    [message] = caplog.messages
    assert message.endswith("left out, as a model of 64 positions cannot be asked: 2")
    rows(file, f"{'good ' * 90}\t1")
    with pytest.raises(EvaluationError, match=r"dev\.tsv: nothing to ask text-classification"):
        draw(source, tokenizer, "text-classification", data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (RealData(text=(WIKI,), labelled=(Path("dev.tsv"),)), "dev.tsv: .* text-classification"),
        (RealData(text=(WIKI,), questions=(SQUAD,)), "squad.json: .* question-answering"),
    ],
)
def test_data_for_a_head_that_is_not_there(
    source: Source, tokenizer: AlbertTokenizer, data: RealData, message: str
) -> None:
    with pytest.raises(EvaluationError, match=f"{message}, only for fill-mask; leave the file out"):
        draw(source, tokenizer, "fill-mask", data)


ALL = 1 << 30


def test_tokens_are_those_that_pretraining_reads(real_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer_file = real_checkpoint / "tokenizer.json"
    [expected] = prepare([WIKI], tokenizer_file, tmp_path / "shards").parts

    part = read_real_text([WIKI], ALL).tokenize(AlbertTokenizer.from_file(tokenizer_file))

    assert part.tokens.tolist() == expected.tokens.tolist()
    assert part.sentences.tolist() == expected.sentences.tolist()
    assert part.documents.tolist() == expected.documents.tolist()


def test_reading_stops_at_the_number_of_characters(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n\n".join([f"{name}{name} one."] * 20))
    text = read_real_text([tmp_path], 250)
    assert text.files == ["a.txt", "b.txt"]
    assert sum(map(len, chain.from_iterable(text.paragraphs))) <= 250


def test_sentences_are_each_there_once(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One is here. Two is there. One is here.\n\nOne is here.")
    text = read_real_text([file], ALL)
    assert text.sentences == ["One is here.", "Two is there."]
    assert [len(each) for each in text.paragraphs] == [3, 1]


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n\n")
    with pytest.raises(EvaluationError, match=r"no text in .*empty\.txt"):
        read_real_text([file], ALL)
    assert read_real_text([], ALL).documents == []
