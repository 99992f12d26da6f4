"""Answers of the question-answering pipeline of transformers 4.57.6, written to a file.

transformers 5.3 has no such pipeline any more, so that it runs in an environment of its own:

    python -m venv old
    old/bin/pip install transformers==4.57.6 numpy torch
    old/bin/python tests/albert_serve/oracle_4_57.py tests/data/answers-4.57.6.json

The model and its vocabulary are made here, from numbers that are the same everywhere, so that the
tests make the same ones. Nothing of this project is imported.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

MAX_POSITIONS: Final = 96
_SPECIAL: Final = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
_H, _E, _FFN = 32, 16, 64

CONTEXTS: Final[dict[str, str]] = {
    "short": "My name is Clara and I live in Berkeley, California.",
    "repeated": "The dog saw the Dog. the dog, THE DOG and a dog-house (dog) saw a dog; a dog!",
    "long": (
        "Marcel Proust was a French novelist, born in Auteuil on 10 July 1871. His father, "
        "Adrien Proust, was a doctor; he studied cholera (in Europe and in Asia). His mother, "
        "Jeanne Weil, was well-read; her letters show a sense of humour. By the age of nine, "
        "Proust had had his first serious attack of asthma, and was considered a sickly child. "
        "Proust spent long holidays in the village of Illiers. This village, with the house of "
        "his great-uncle in Auteuil, became the model for the town of Combray. (Illiers was "
        'renamed "Illiers-Combray" in 1971 for the Proust centenary.) His father died in 1903; '
        "his mother died in 1905, and left him a considerable inheritance."
    ),
    "odd": (
        "  A ½ ﬁne cafe\u0301, naïve İstanbul\u00a0ß -- 東京タワー \n\t 5€/kg “quoted” ... e.g. "
        "3.14 😀 end "
    ),
    "special": "He wrote [MASK] and [CLS] and [SEP] in the text, [MASK]. Then he left.",
    "word": "Berkeley",
    "same": "dog Dog DOG " * 60,
}
QUESTIONS: Final[dict[str, str]] = {
    "plain": "Where did he live?",
    "long": "Who was the father of Marcel Proust, the novelist who was born in Auteuil in 1871?",
    "special": "What [CLS] is [MASK] it?",
}
PARAMETERS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"top_k": 2},
    {"top_k": 8},
    {"top_k": 3, "align_to_words": False},
    {"align_to_words": False},
    {"top_k": 4, "handle_impossible_answer": True},
    {"handle_impossible_answer": True, "align_to_words": False, "top_k": 5},
    {"max_answer_len": 1, "top_k": 6},
    {"max_answer_len": 4, "top_k": 6},
    {"max_question_len": 2, "top_k": 2},
    {"max_seq_len": 48, "doc_stride": 0, "top_k": 5},
    {"max_seq_len": 48, "doc_stride": 9, "top_k": 10},
    {"max_seq_len": 64, "doc_stride": 20, "top_k": 7, "align_to_words": False},
    {"max_seq_len": 48, "doc_stride": 5, "handle_impossible_answer": True, "max_answer_len": 3},
    {"max_seq_len": 48, "doc_stride": 12, "max_answer_len": 1, "top_k": 9},
)


def write_checkpoint(folder: Path) -> None:
    """A small ALBERT with a head for questions, as a Hugging Face directory."""
    tokenizer = _make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size: int = tokenizer.get_vocab_size()
    config = {
        "architectures": ["AlbertForQuestionAnswering"],
        "model_type": "albert",
        "vocab_size": vocab_size,
        "embedding_size": _E,
        "hidden_size": _H,
        "num_hidden_layers": 2,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "num_attention_heads": 2,
        "intermediate_size": _FFN,
        "max_position_embeddings": MAX_POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    about_tokens = {"tokenizer_class": "AlbertTokenizer", "model_max_length": MAX_POSITIONS}
    for name, content in (("config", config), ("tokenizer_config", about_tokens)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    weights = {name: _weight(name, shape) for name, shape in _shapes(vocab_size).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _make_tokenizer() -> Tokenizer:
    """ALBERT's, with letters, and beginnings and ends of the words that are asked about."""
    texts = [*CONTEXTS.values(), *QUESTIONS.values()]
    words = sorted({word for text in texts for word in _words(text)})
    pieces = dict.fromkeys(_SPECIAL, 0.0)
    pieces["▁"] = -3.0
    pieces |= dict.fromkeys(sorted({letter for word in words for letter in word}), -9.0)
    for word in words:
        pieces.setdefault(f"▁{word[:4]}", -7.0)
        pieces.setdefault(word[4:] or word[-1:], -8.0)
    tokenizer = Tokenizer(models.Unigram(list(pieces.items()), unk_id=1))
    tokenizer.normalizer = _normalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in _SPECIAL])
    return tokenizer


def _normalizer() -> Any:
    return normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )


def _words(text: str) -> list[str]:
    normalized: str = _normalizer().normalize_str(text)
    # Not every character: some shall be unknown.
    known = "".join(c if (c.isascii() and c.isalnum()) or c in ",.;(-" else " " for c in normalized)
    return known.split()


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "albert.embeddings.word_embeddings.weight": (vocab_size, _E),
        "albert.embeddings.position_embeddings.weight": (MAX_POSITIONS, _E),
        "albert.embeddings.token_type_embeddings.weight": (2, _E),
        "albert.embeddings.LayerNorm.weight": (_E,),
        "albert.embeddings.LayerNorm.bias": (_E,),
        "albert.encoder.embedding_hidden_mapping_in.weight": (_H, _E),
        "albert.encoder.embedding_hidden_mapping_in.bias": (_H,),
        f"{layer}ffn.weight": (_FFN, _H),
        f"{layer}ffn.bias": (_FFN,),
        f"{layer}ffn_output.weight": (_H, _FFN),
        f"{layer}ffn_output.bias": (_H,),
        f"{layer}full_layer_layer_norm.weight": (_H,),
        f"{layer}full_layer_layer_norm.bias": (_H,),
        f"{layer}attention.LayerNorm.weight": (_H,),
        f"{layer}attention.LayerNorm.bias": (_H,),
        "qa_outputs.weight": (2, _H),
        "qa_outputs.bias": (2,),
    }
    for part in ("query", "key", "value", "dense"):
        shapes[f"{layer}attention.{part}.weight"] = (_H, _H)
        shapes[f"{layer}attention.{part}.bias"] = (_H,)
    return shapes


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    # RandomState is frozen: NumPy promises the same numbers in every version.
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if "LayerNorm.weight" in name or "layer_norm.weight" in name:
        drawn = 1.0 + 0.1 * drawn
    elif name == "qa_outputs.weight":
        drawn = 0.7 * drawn
    elif len(shape) == 2:
        drawn = drawn / shape[1] ** 0.5
    else:
        drawn = 0.1 * drawn
    return drawn.astype(np.float32)


def main(output: Path) -> None:
    """Answer every question on every context with every set of parameters."""
    # Another version than the one that type checkers see.
    transformers: Any = importlib.import_module("transformers")
    assert transformers.__version__ == "4.57.6", transformers.__version__
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        pipeline = transformers.pipeline("question-answering", model=folder, device="cpu")
        cases = [
            {
                "question": question,
                "context": context,
                "parameters": parameters,
                "answer": _answer(pipeline, question, context, parameters),
            }
            for question in QUESTIONS
            for context in CONTEXTS
            for parameters in PARAMETERS
        ]
    lines = ",\n".join(json.dumps(case) for case in cases)
    output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _answer(pipeline: Any, question: str, context: str, parameters: Mapping[str, Any]) -> Any:
    """One answer as [start, end, score], several as a list of these."""
    answer = pipeline(question=QUESTIONS[question], context=CONTEXTS[context], **parameters)
    several = answer if isinstance(answer, list) else [answer]
    answers = []
    for one in several:
        assert one["answer"] == CONTEXTS[context][one["start"] : one["end"]]
        answers.append([one["start"], one["end"], float(f"{one['score']:.8g}")])
    return answers if isinstance(answer, list) else answers[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
