"""Small teachers with tokenizers of their own, made by `transformers`, and what they compute."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import WIKI, randomize
from training.distillation.alignment import AlignedSequence
from training.distillation.teacher import Teacher, TeacherBatch

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_act": "gelu",
}
# Words of the tiny BERT's vocabulary, besides every letter of the articles.
_NUM_WORDS: Final = 600
_LAYER_SCALE: Final = 0.4
# The words of the easy corpus.
_EASY: Final = (
    "The school is in the city. Many people came to play music. A river was named after him. "
    "They won two games in May. Her father had been a king."
)

# Texts that a classifier labels in different ways.
TEXTS: Final = [
    *("The school is in the city.", "They won two games in May."),
    *("A river was named after him.", "Her father had been a king."),
    *("Many people came to play music.", "The king came to the school."),
]


@cache
def articles() -> tuple[str, ...]:
    """The texts of `wiki.jsonl`."""
    return tuple(json.loads(line)["text"] for line in WIKI.read_text().splitlines())


def make_bert(folder: Path, *, text: str = "", **changes: Any) -> Path:
    """A BERT whose WordPiece vocabulary has the letters and most frequent words of a text.

    Args:
        text: the articles, and enough of the easy corpus, where it is not given.
    """
    counts = Counter(_words(text or " ".join([*articles(), *[_EASY] * 50]).lower()))
    letters = sorted({letter for word in counts for letter in word})
    common = [word for word, _ in counts.most_common(_NUM_WORDS)]
    pieces = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *letters]
    pieces += [*(f"##{letter}" for letter in letters if letter.isalnum()), *common]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    transformers.BertTokenizer(vocab=vocab).save_pretrained(folder)
    sizes = {"vocab_size": len(vocab), "max_position_embeddings": 64, **SIZES, **changes}
    return _save(transformers.BertModel(transformers.BertConfig(**sizes)), folder)


def make_classifier(folder: Path, **changes: Any) -> Path:
    """A BERT with a classifier of three labels whose logits differ from text to text."""
    make_bert(folder)
    config = transformers.BertConfig.from_pretrained(folder)
    labels = {0: "school", 1: "king", 2: "river"}
    config.update({"id2label": labels, "label2id": {v: k for k, v in labels.items()}, **changes})
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=2.0 if "classifier" in name else 0.3)
    model.save_pretrained(folder)
    return folder


def _words(text: str) -> list[str]:
    """As BERT cuts them: letters and digits, and each other character alone."""
    return re.findall(r"\w+|[^\w\s]", text)


def make_roberta(folder: Path, **changes: Any) -> Path:
    """A RoBERTa with a byte-level BPE vocabulary; its positions begin behind the padding's."""
    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator(
        (text.lower() for text in articles()),
        vocab_size=700,
        special_tokens=special,
        show_progress=False,
    )
    model = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(pair) for pair in model["merges"]]
    tokenizer = transformers.RobertaTokenizerFast(vocab=model["vocab"], merges=merges)
    tokenizer.save_pretrained(folder)
    sizes = {"max_position_embeddings": 66, "type_vocab_size": 1, **SIZES, **changes}
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=2, **sizes
    )
    return _save(transformers.RobertaModel(config), folder)


def make_albert(folder: Path, vocab_dir: Path, **changes: Any) -> Path:
    """An ALBERT whose vocabulary has the student's letters and every other one of its words."""
    content = json.loads((vocab_dir / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = [
        piece for index, piece in enumerate(vocab) if index % 2 or index < 5 or len(piece[0]) == 1
    ]
    save_tokenizer(folder, Tokenizer.from_str(json.dumps(content)), pad="<pad>", unk="<unk>")
    sizes = {"max_position_embeddings": 64, "embedding_size": 16, **SIZES, **changes}
    config = transformers.AlbertConfig(vocab_size=len(content["model"]["vocab"]), **sizes)
    return _save(transformers.AlbertModel(config), folder)


def save_tokenizer(
    folder: Path, backend: Tokenizer, *, pad: str = "[PAD]", unk: str = "[UNK]"
) -> None:
    """Save a tokenizer to be read as it is; of a BERT's, `transformers` takes the words alone."""
    make: Any = transformers.PreTrainedTokenizerFast
    make(
        tokenizer_object=backend,
        pad_token=pad,
        unk_token=unk,
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)


def _save(model: Any, folder: Path) -> Path:
    """Random weights, of which attention's do not drown what they are added to.

    Else all words of a text would come to look the same.
    """
    randomize(model, seed=3)
    with torch.no_grad():
        for name, parameter in model.encoder.named_parameters():
            if not re.search("query|key|norm", name.lower()):
                parameter.mul_(_LAYER_SCALE)
    model.save_pretrained(folder)
    return folder


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the weights of a model that was saved, by their names."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def read_by(teacher: Teacher, texts: Sequence[str]) -> TeacherBatch:
    """Texts as the teacher reads them, right-padded by its own tokenizer."""
    encoded = teacher.tokenizer.hf(list(texts), padding=True, return_tensors="pt")
    ids = encoded["input_ids"]
    types = encoded.get("token_type_ids", torch.zeros_like(ids))
    return TeacherBatch(ids, types, encoded["attention_mask"].bool())


def letters_by_span(
    aligned: AlignedSequence, ids: Sequence[int], student: AlbertTokenizer, teacher: Teacher
) -> list[tuple[str, str | None]]:
    """The characters of the student's and of the teacher's pieces of each span.

    None where the teacher leaves the span out, or has a piece for it that spells nothing.
    """
    num_spans = int(aligned.student_spans[-1]) + 1
    ours, theirs = [""] * num_spans, [list[int]() for _ in range(num_spans)]
    for index, span in zip(ids, aligned.student_spans, strict=True):
        ours[span] += student.token(index).replace("▁", "")
    for index, span in zip(aligned.teacher_ids, aligned.teacher_spans, strict=True):
        theirs[span].append(int(index))
    return list(zip(ours, [_spelled(teacher, each) for each in theirs], strict=True))


def _spelled(teacher: Teacher, ids: list[int]) -> str | None:
    hf = teacher.tokenizer.hf
    if not ids or set(ids) & set(hf.all_special_ids):
        return None
    tokens = hf.convert_ids_to_tokens(ids)
    if teacher.model.config.model_type == "roberta":
        return str(hf.convert_tokens_to_string(tokens)).strip()
    return "".join(token.removeprefix("##").replace("▁", "") for token in tokens)
