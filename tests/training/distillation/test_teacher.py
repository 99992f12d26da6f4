"""A teacher computes what `transformers` does, and one that cannot teach is told in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from tests.training.distillation.conftest import CPU
from tests.training.distillation.teachers import (
    change_weights,
    make_bert,
    read_by,
    save_tokenizer,
)
from training.distillation.teacher import (
    HfTokenizer,
    Teacher,
    TeacherError,
    load_teacher,
)

TEXTS = ("The school is in the city.", "They won.", "Her father had been a king, and played music.")


@pytest.fixture
def folder(teacher_dir: Path, tmp_path: Path) -> Path:
    """A copy of the BERT, to be changed."""
    return Path(shutil.copytree(teacher_dir, tmp_path / "teacher"))


@pytest.mark.parametrize("name", ["WordPiece", "byte-level BPE", "unigram"])
def test_states_are_those_of_transformers(name: str, teachers: dict[str, Teacher]) -> None:
    teacher = teachers[name]
    batch = read_by(teacher, TEXTS)
    assert not batch.is_real.all()
    if teacher.num_types > 1:
        types = (torch.arange(batch.ids.shape[1]) > 3).long().expand_as(batch.ids)
        batch = replace(batch, types=types)
    hf = teacher.tokenizer.hf(list(TEXTS), padding=True, return_tensors="pt")
    with torch.no_grad():
        out = teacher.model(
            input_ids=hf["input_ids"],
            attention_mask=hf["attention_mask"],
            token_type_ids=batch.types if teacher.num_types > 1 else None,
            output_hidden_states=True,
        )
    states = teacher.states(batch, [0, 2, 3])
    for state, layer in zip(states, [0, 2, 3], strict=True):
        assert torch.equal(state, out.hidden_states[layer])
    assert not any(state.requires_grad for state in states)


def test_words_are_not_padded_and_not_cut(teacher: Teacher, folder: Path) -> None:
    """Sentence encoders have both in their `tokenizer.json`."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_padding(length=32)
    backend.enable_truncation(3)
    save_tokenizer(folder, backend)
    saved = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
    assert len(saved.encode("a").ids) == 32
    padding = load_teacher(str(folder), CPU)
    for word in ("a", "schoolmasters", ""):
        pieces = padding.tokenizer.encode_word(word)
        assert pieces == teacher.tokenizer.encode_word(word)
        assert "".join(word[piece.begin : piece.end] for piece in pieces) == word


@pytest.mark.parametrize("piece", ["£", "ß", "ı"])
def test_letters_that_name_bytes_are_not_taken_for_themselves(piece: str, roberta: Teacher) -> None:
    known = roberta.tokenizer
    assert known.hf.convert_tokens_to_ids(piece) != known.unk_id
    assert known.hf.decode(known.continuation(piece)).strip() == piece
    assert known.hf.convert_ids_to_tokens(known.continuation("th")) == ["th"]


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def cut_short(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def without_weights(folder: Path) -> None:
    """Of which the pooler is none: models of masked tokens have none."""

    def remove(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("pooler")]:
            del weights[name]
        for part in ("attention.output", "output"):
            del weights[f"encoder.layer.1.{part}.dense.bias"]

    change_weights(folder, remove)


def of_another_model(folder: Path) -> None:
    make_bert(folder.parent / "smaller", vocab_size=500)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(folder.parent / "smaller" / file, folder / file)


def decoder(folder: Path) -> None:
    transformers.T5Config(d_model=32, num_layers=1).save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "teacher {} cannot be loaded: "),
        (without_tokenizer, "{} has no tokenizer; it needs tokenizer.json, or a vocabulary"),
        (cut_short, "teacher {} cannot be loaded: Error while deserializing header: incomplete"),
        (without_weights, "{} lacks 2 weights of its model, encoder.layer.1.attention.output.den"),
        (of_another_model, "{}: the tokenizer has "),
        (decoder, "{} is a t5, not an encoder; give a BERT, RoBERTa, MiniLM, ELECTRA or ALBERT"),
    ],
)
def test_a_model_that_cannot_teach_is_refused_in_one_line(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(TeacherError) as caught:
        load_teacher(str(folder), CPU)
    assert str(caught.value).startswith(message.format(folder))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_encodes_no_words_is_refused(folder: Path) -> None:
    with pytest.raises(TeacherError, match=r"is not a fast one; it needs tokenizer\.json"):
        HfTokenizer(transformers.ByT5Tokenizer())
    read: Any = transformers.PreTrainedTokenizerFast
    tokenizer = read(tokenizer_file=str(folder / "tokenizer.json"))
    with pytest.raises(TeacherError, match="has no cls_token_id; it is not an encoder's"):
        HfTokenizer(tokenizer)
