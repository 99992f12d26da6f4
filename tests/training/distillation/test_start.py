"""A student that starts from its teacher computes what the teacher does, as far as sizes allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import SPECIAL_TOKENS, AlbertTokenizer
from tests.training.distillation.conftest import CPU
from tests.training.distillation.teachers import make_bert
from training.data.shards import Shards
from training.distillation.losses import unexplained_variance
from training.distillation.start import (
    check_start,
    shared_pieces,
    sizes_of,
    start_from_teacher,
    word_rows,
)
from training.distillation.teacher import Teacher, TeacherBatch, TeacherError, load_teacher
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks, FillMaskHead

NUM_PIECES = len(SPECIAL_TOKENS)


def config_of(teacher: Teacher, **changes: object) -> AlbertConfig:
    config = AlbertConfig(vocab_size=800, embedding_size=teacher.hidden_size, **sizes_of(teacher))
    return replace(config, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def counts(shards: Shards) -> NDArray[np.int64]:
    return shards.token_counts(800)


def started(
    teacher: Teacher,
    tokenizer: AlbertTokenizer,
    counts: NDArray[np.int64],
    layers: tuple[int, ...] = (2,),
    **changes: object,
) -> AlbertForTasks:
    torch.manual_seed(0)
    model = AlbertForTasks(config_of(teacher, **changes), {"fill-mask": 800})
    start_from_teacher(model, teacher, tokenizer, counts, layers)
    return model.eval()


def both_read(teacher: Teacher, tokenizer: AlbertTokenizer) -> tuple[ModelInputs, TeacherBatch]:
    """Rows of pieces that both vocabularies have, in the ids of either."""
    shared = [
        int(index)
        for index in np.flatnonzero(shared_pieces(teacher, tokenizer))
        if tokenizer.token(int(index)).lstrip("▁").isascii() and index >= NUM_PIECES
    ]
    generator = np.random.default_rng(0)
    ids = generator.choice(shared, (4, 24))
    theirs = np.vectorize(lambda index: teacher_id(teacher, tokenizer.token(int(index))))(ids)
    types = torch.from_numpy(np.repeat([[0] * 10 + [1] * 14], 4, axis=0))
    real = torch.ones(4, 24, dtype=torch.bool)
    ours = ModelInputs(ids=torch.from_numpy(ids), types=types)
    return ours, TeacherBatch(torch.from_numpy(theirs), types, real)


def teacher_id(teacher: Teacher, piece: str) -> int:
    """The teacher's id of a piece, by how its vocabulary writes it within a word or at its begin.

    What a vocabulary has at the begin of words alone, such as BERT's signs, is that everywhere.
    """
    vocab = teacher.tokenizer.hf.get_vocab()
    begins, goes_on = ("", "##") if "[PAD]" in vocab else ("Ġ", "")
    if piece.startswith("▁"):
        return int(vocab[begins + piece[1:]])
    return int(vocab[goes_on + piece if goes_on + piece in vocab else begins + piece])


def embedded(model: AlbertForTasks, batch: ModelInputs) -> Tensor:
    embeddings: Tensor = model.albert.embeddings(batch.ids, batch.types, None)
    return embeddings


@pytest.mark.parametrize("name", ["WordPiece", "byte-level BPE"])
@torch.no_grad()
def test_a_student_without_sharing_computes_what_its_teacher_does(
    name: str,
    teachers: dict[str, Teacher],
    tokenizer: AlbertTokenizer,
    counts: NDArray[np.int64],
) -> None:
    teacher = teachers[name]
    model = started(teacher, tokenizer, counts, (1, 2, 3), sharing="none")
    ours, theirs = both_read(teacher, tokenizer)
    expected = teacher.states(theirs, range(4))
    assert torch.allclose(embedded(model, ours), expected[0], atol=1e-5)
    for actual, state in zip(model.albert.states(ours), expected, strict=True):
        assert torch.allclose(actual, state, atol=1e-4)
    head = model.heads["fill-mask"]
    assert isinstance(head, FillMaskHead)
    frequencies = np.log((counts + 1) / (counts + 1).sum())
    assert np.allclose(head.decoder.bias.numpy(), frequencies, atol=1e-5)


@torch.no_grad()
def test_the_shared_layer_is_one_of_the_teachers(
    teacher: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    model = started(teacher, tokenizer, counts, (2,), embedding_size=8)
    (attention,), (ffn,) = model.albert.encoder.attentions, model.albert.encoder.ffns
    _, batch = both_read(teacher, tokenizer)
    before, after = teacher.states(batch, [1, 2])
    assert torch.allclose(ffn(attention(before, None)), after, atol=1e-5)


def test_pieces_that_the_teacher_lacks_are_means_of_its_pieces(
    teacher: Teacher, tokenizer: AlbertTokenizer
) -> None:
    rows, shared = word_rows(teacher, tokenizer), shared_pieces(teacher, tokenizer)
    table = teacher.model.embeddings.word_embeddings.weight
    unk = table[teacher.tokenizer.unk_id]
    num_means = 0
    for index in np.flatnonzero(~shared):
        piece = tokenizer.token(int(index))
        if not piece.startswith("▁") or piece == "▁":
            continue
        ids = teacher.tokenizer.hf(piece[1:], add_special_tokens=False)["input_ids"]
        assert len(ids) > 1 or ids == [teacher.tokenizer.unk_id]
        assert torch.allclose(rows[index], table[ids].mean(0))
        num_means += not torch.equal(rows[index], unk)
    assert num_means > 10
    known = teacher.tokenizer
    special = [known.pad_id, known.unk_id, known.cls_id, known.sep_id, known.hf.mask_token_id]
    assert torch.equal(rows[:NUM_PIECES], table[special])


@torch.no_grad()
def test_smaller_embeddings_explain_the_more_the_larger_they_are(
    teacher: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    ours, theirs = both_read(teacher, tokenizer)
    (expected,) = (state.flatten(0, 1) for state in teacher.states(theirs, [0]))
    every = torch.ones(len(expected), dtype=torch.bool)
    unexplained: list[float] = []
    explained: list[float] = []
    for size in (2, 4, 8, 16, 32):
        model = AlbertForTasks(config_of(teacher, embedding_size=size), {"fill-mask": 800})
        explained.append(start_from_teacher(model, teacher, tokenizer, counts, (2,)))
        unexplained.append(
            float(unexplained_variance(embedded(model, ours).flatten(0, 1), expected, every))
        )
    assert unexplained == sorted(unexplained, reverse=True)
    assert explained == sorted(explained)
    assert unexplained[0] < 1.1
    assert unexplained[3] < 0.5
    assert unexplained[4] < 1e-8
    assert explained[4] == 1.0


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({"activation": "gelu_tanh"}, (2,), "activation is gelu in {} and gelu_tanh"),
        ({"sharing": "attention"}, (1,), "has 1 attention blocks and 3 feed-forward blocks"),
    ],
)
def test_a_start_that_does_not_fit(
    changes: dict[str, object], layers: tuple[int, ...], message: str, teacher: Teacher
) -> None:
    with pytest.raises(TeacherError) as caught:
        check_start(config_of(teacher, **changes), teacher, layers)
    assert message.format(teacher.name) in str(caught.value)


def electra(folder: Path) -> transformers.PreTrainedModel:
    """An ELECTRA-Small has embeddings of 128 and hidden states of 256."""
    vocab_size = len(transformers.AutoTokenizer.from_pretrained(folder))
    return transformers.ElectraModel(
        transformers.ElectraConfig(
            embedding_size=16,
            hidden_size=32,
            intermediate_size=64,
            vocab_size=vocab_size,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (electra, {}, "has embeddings of 16 and hidden states of 32"),
        (None, {"hidden_act": "relu"}, "BERT's structure \\('relu'\\)"),
    ],
)
def test_teachers_whose_layers_are_no_start(
    tmp_path: Path,
    make: Callable[[Path], transformers.PreTrainedModel] | None,
    changes: dict[str, str],
    message: str,
) -> None:
    folder = make_bert(tmp_path / "teacher", **changes)
    if make is not None:
        make(folder).save_pretrained(folder)
    other = load_teacher(str(folder), CPU)
    with pytest.raises(TeacherError, match=message):
        check_start(config_of(other), other, (2,))


def test_an_albert_gives_its_start_by_initialize_from(albert: Teacher) -> None:
    with pytest.raises(
        TeacherError, match=r"layers of .* do not have BERT's structure; use --start local"
    ):
        check_start(config_of(albert), albert, (2,))
