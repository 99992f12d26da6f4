"""A student that starts from its teacher computes what the teacher does, as far as sizes allow."""

from __future__ import annotations

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
from training.distillation.job import check_vocabulary
from training.distillation.losses import unexplained_variance
from training.distillation.start import (
    check_start,
    default_layers,
    shared_pieces,
    sizes_of,
    start_from_teacher,
    word_rows,
)
from training.distillation.teacher import Teacher, TeacherBatch, TeacherError, load_teacher
from training.model.albert import Attention, Batch, FeedForward
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


def both_read(teacher: Teacher, tokenizer: AlbertTokenizer) -> tuple[Batch, TeacherBatch]:
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
    ours = Batch(ids=torch.from_numpy(ids), types=types)
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


def embedded(model: AlbertForTasks, batch: Batch) -> Tensor:
    embeddings: Tensor = model.albert.embeddings(batch.ids, batch.types, None)
    return embeddings


@pytest.mark.parametrize("name", ["WordPiece", "byte-level BPE"])
@torch.no_grad()
def test_embeddings_of_the_teachers_width_are_its_own(
    name: str,
    teachers: dict[str, Teacher],
    tokenizer: AlbertTokenizer,
    counts: NDArray[np.int64],
) -> None:
    teacher = teachers[name]
    model = started(teacher, tokenizer, counts)
    ours, theirs = both_read(teacher, tokenizer)
    (expected,) = teacher.states(theirs, [0], with_attention=False).hidden
    assert torch.allclose(embedded(model, ours), expected, atol=1e-5)
    table = teacher.model.embeddings.word_embeddings.weight
    assert torch.equal(model.albert.embeddings.word.weight[ours.ids], table[theirs.ids])


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
    expected = teacher.states(theirs, range(4), with_attention=False).hidden
    for actual, state in zip(model.albert.states(ours), expected, strict=True):
        assert torch.allclose(actual, state, atol=1e-4)


@torch.no_grad()
def test_the_shared_layer_is_one_of_the_teachers(
    teacher: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    model = started(teacher, tokenizer, counts, (2,), embedding_size=8)
    (attention,), (ffn,) = model.albert.encoder.attentions, model.albert.encoder.ffns
    assert isinstance(attention, Attention)
    assert isinstance(ffn, FeedForward)
    layer = teacher.model.encoder.layer[1]
    pairs = {
        attention.query: layer.attention.self.query,
        attention.key: layer.attention.self.key,
        attention.value: layer.attention.self.value,
        attention.output: layer.attention.output.dense,
        attention.norm: layer.attention.output.LayerNorm,
        ffn.up: layer.intermediate.dense,
        ffn.down: layer.output.dense,
        ffn.norm: layer.output.LayerNorm,
    }
    for ours, theirs in pairs.items():
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter, theirs.get_parameter(name))
    _, batch = both_read(teacher, tokenizer)
    before, after = teacher.states(batch, [1, 2], with_attention=False).hidden
    assert torch.allclose(ffn(attention(before, None)), after, atol=1e-5)


@torch.no_grad()
def test_groups_start_from_layers_of_their_own(
    teacher: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    model = started(teacher, tokenizer, counts, (3, 1), num_groups=2)
    for block, number in zip(model.albert.encoder.attentions, (3, 1), strict=True):
        theirs = teacher.model.encoder.layer[number - 1].attention.self.query
        assert torch.equal(block.get_parameter("query.weight"), theirs.weight)


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
    assert torch.equal(rows[SPECIAL_TOKENS.index("<unk>")], unk)


def test_special_tokens_are_the_teachers(teacher: Teacher, tokenizer: AlbertTokenizer) -> None:
    rows = word_rows(teacher, tokenizer)
    known = teacher.tokenizer
    ids = [known.pad_id, known.unk_id, known.cls_id, known.sep_id, known.hf.mask_token_id]
    table = teacher.model.embeddings.word_embeddings.weight
    assert torch.equal(rows[:NUM_PIECES], table[ids])


def test_a_teacher_of_one_type_gives_it_to_both_segments(
    roberta: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    embeddings = started(roberta, tokenizer, counts).albert.embeddings
    (only,) = roberta.model.embeddings.token_type_embeddings.weight
    assert torch.equal(embeddings.token_type.weight, only.expand(2, -1))
    positions = roberta.model.embeddings.position_embeddings.weight
    assert torch.equal(embeddings.position.weight, positions[2:])


@torch.no_grad()
def test_smaller_embeddings_explain_the_more_the_larger_they_are(
    teacher: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    ours, theirs = both_read(teacher, tokenizer)
    (expected,) = (
        state.flatten(0, 1) for state in teacher.states(theirs, [0], with_attention=False).hidden
    )
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


@pytest.mark.parametrize("size", [1, 2, 16])
@torch.no_grad()
def test_the_norm_of_smaller_embeddings_takes_no_mean_away(
    size: int, teacher: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    model = started(teacher, tokenizer, counts, embedding_size=size)
    embeddings = model.albert.embeddings
    for table in (embeddings.word, embeddings.position, embeddings.token_type):
        assert table.weight.mean(-1).abs().max() < 1e-6
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_the_output_bias_is_the_corpus_log_frequencies(
    teacher: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    head = started(teacher, tokenizer, counts).heads["fill-mask"]
    assert isinstance(head, FillMaskHead)
    expected = np.log((counts + 1) / (counts + 1).sum())
    assert np.allclose(head.decoder.bias.numpy(), expected, atol=1e-5)


def test_the_same_seed_gives_the_same_start(
    teacher: Teacher, tokenizer: AlbertTokenizer, counts: NDArray[np.int64]
) -> None:
    one, other = (started(teacher, tokenizer, counts, embedding_size=16) for _ in range(2))
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("num_groups", "num_layers", "layers"),
    [
        (1, 12, (8,)),
        (1, 6, (4,)),
        (1, 1, (1,)),
        (2, 12, (1, 12)),
        (3, 3, (1, 2, 3)),
        (4, 12, (1, 5, 8, 12)),
        (6, 3, (1, 1, 2, 2, 3, 3)),
    ],
)
def test_default_layers_spread_evenly(
    num_groups: int, num_layers: int, layers: tuple[int, ...]
) -> None:
    assert default_layers(num_groups, num_layers) == layers


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({"hidden_size": 64}, (2,), "hidden_size is 32 in {} and 64 in the student; --start"),
        ({"num_heads": 2}, (2,), "num_heads is 4 in {} and 2 in the student"),
        ({"ffn_size": 128}, (2,), "ffn_size is 64 in {} and 128 in the student"),
        ({"activation": "gelu_tanh"}, (2,), "activation is gelu in {} and gelu_tanh"),
        ({"embedding_size": 33}, (2,), "--embedding-size 33 is over the teacher's hidden size 32"),
        ({"max_positions": 65}, (2,), "--max-positions 65: {} has 64"),
        ({}, (1, 2), "--start-layers names 2 layers of the teacher; the student has 1 attention"),
        ({"num_groups": 2}, (1,), "names 1 layers of the teacher; the student has 2 attention"),
        ({"sharing": "attention"}, (1,), "has 1 attention blocks and 3 feed-forward blocks"),
        ({}, (4,), "--start-layers 4: the teacher has 1 to 3"),
    ],
)
def test_a_start_that_does_not_fit(
    changes: dict[str, object], layers: tuple[int, ...], message: str, teacher: Teacher
) -> None:
    with pytest.raises(TeacherError) as caught:
        check_start(config_of(teacher, **changes), teacher, layers)
    assert message.format(teacher.name) in str(caught.value)


def test_an_albert_gives_its_start_by_initialize_from(albert: Teacher) -> None:
    config = config_of(albert)
    with pytest.raises(
        TeacherError, match=r"layers of .* are not built as BERT's; .*--start local"
    ):
        check_start(config, albert, (2,))


def test_a_teacher_whose_embeddings_are_narrower(tmp_path: Path, teacher_dir: Path) -> None:
    """An ELECTRA-Small has 128 and 256."""
    folder = make_bert(tmp_path / "electra")
    hf = transformers.ElectraConfig(
        embedding_size=16,
        vocab_size=len(load_teacher(str(teacher_dir), CPU).tokenizer.hf),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    transformers.ElectraModel(hf).save_pretrained(folder)
    narrow = load_teacher(str(folder), CPU)
    with pytest.raises(TeacherError, match="has embeddings of 16 and hidden states of 32"):
        check_start(config_of(narrow), narrow, (2,))


def test_a_teacher_of_another_activation(tmp_path: Path) -> None:
    other = load_teacher(str(make_bert(tmp_path / "relu", hidden_act="relu")), CPU)
    with pytest.raises(TeacherError, match="has the activation relu; a student that starts from"):
        sizes_of(other)


def test_a_teacher_whose_sizes_have_other_names(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "distilbert")
    hf = transformers.DistilBertConfig(vocab_size=1000, dim=32, n_layers=2, n_heads=4)
    transformers.DistilBertModel(hf).save_pretrained(folder)
    other = load_teacher(str(folder), CPU)
    with pytest.raises(TeacherError, match=r"is a distilbert, .*--preset"):
        sizes_of(other)


def test_a_vocabulary_with_almost_nothing_in_common(
    teacher: Teacher, tokenizer: AlbertTokenizer, shards: Shards, tmp_path: Path
) -> None:
    check_vocabulary(teacher, tokenizer, shards)
    greek = load_teacher(str(make_bert(tmp_path / "greek", text="αβγ δεζ")), CPU)
    with pytest.raises(TeacherError) as caught:
        check_vocabulary(greek, tokenizer, shards)
    assert "% of the corpus' tokens are pieces of " in str(caught.value)
    assert "is it a teacher of another language?" in str(caught.value)
