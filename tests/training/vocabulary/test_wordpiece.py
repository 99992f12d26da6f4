"""A `vocab.txt` gives the ids, pieces and offsets of `transformers`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.client import AlbertClient
from albert_serve.tokenizer import AlbertTokenizer
from tests.export.exporting import export_bundle
from tests.training.support import TINY
from training.conversion.source import open_checkpoint
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks
from training.vocabulary.settings import VocabError, VocabularySettings, read_settings
from training.vocabulary.wordpiece import build_wordpiece

PIECES = [
    *"我你他们今天气很好去北京上海学校不是的了。，", *"abcdefghijklmnopqrstuvwxyz", "über", "Über",
    *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyzü"),
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Vocabularies of BERT have unused pieces between the special tokens.
WITH_UNUSED = ["[PAD]", *(f"[unused{index}]" for index in range(1, 20)), *SPECIAL[1:], *PIECES]


def write_vocabulary(folder: Path, pieces: list[str], **config: Any) -> None:
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    keys = {"tokenizer_class": "BertTokenizer", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))


@pytest.mark.parametrize("pieces", [[*SPECIAL, *PIECES], WITH_UNUSED], ids=["dense", "unused"])
@pytest.mark.parametrize("config", [{}, {"do_lower_case": False}, {"strip_accents": False}])
def test_ids_and_offsets_are_those_of_transformers(
    tmp_path: Path, pieces: list[str], config: dict[str, Any]
) -> None:
    write_vocabulary(tmp_path, pieces, **config)
    hf_tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    settings_ = VocabularySettings(**config)
    tokenizer = AlbertTokenizer(build_wordpiece(tmp_path / "vocab.txt", settings_))
    parts = st.sampled_from([*"今天很好Über ü,。é한", "[MASK]", "play", "UP", "\u0301", "\n"])

    @settings(deadline=None, max_examples=60)
    @given(st.lists(parts, max_size=10).map("".join), st.lists(parts, min_size=1).map("".join))
    def check(text: str, pair: str) -> None:
        encoding = tokenizer.encode(text, pair)
        expected = hf_tokenizer(text, pair, return_offsets_mapping=True)
        assert encoding.ids == expected["input_ids"]
        assert encoding.types == expected["token_type_ids"]
        for offsets, hf_offsets in zip(encoding.offsets, expected["offset_mapping"], strict=True):
            assert offsets >= hf_offsets  # ours include a combining accent

    check()
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.decode([token_id], keep_special=True) == hf_tokenizer.decode([token_id])


def test_a_vocabulary_of_another_format_is_rejected(tmp_path: Path) -> None:
    japanese = VocabularySettings(tokenizer_class="BertJapaneseTokenizer")
    for pieces, settings_, message in (
        (PIECES, VocabularySettings(), r"no \[PAD\] nor \[UNK\]"),
        ([*SPECIAL, "a", "a"], VocabularySettings(), "'a' twice"),
        ([*SPECIAL, "a"], japanese, "BertJapaneseTokenizer"),
    ):
        write_vocabulary(tmp_path, pieces)
        with pytest.raises(VocabError, match=message):
            build_wordpiece(tmp_path / "vocab.txt", settings_)


def test_settings_are_read_from_tokenizer_config_json(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == VocabularySettings()
    file = tmp_path / "tokenizer_config.json"
    content = {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False}
    tokens = {"cls_token": "<s>", "mask_token": {"content": "<mask>"}, "pad_token": None}
    file.write_text(json.dumps({**content, **tokens, "model_max_length": 1}))
    expected = VocabularySettings(tokenizer_class="BertTokenizer", do_lower_case=False)
    assert read_settings(tmp_path) == replace(expected, special={"cls": "<s>", "mask": "<mask>"})
    file.write_text('{"keep_accents": 1}')
    with pytest.raises(VocabError, match=f"{file}.* keep_accents is 1. Set it to true or false"):
        read_settings(tmp_path)


def test_a_checkpoint_with_vocab_txt_is_exported_and_served(tmp_path: Path) -> None:
    """The checkpoint has random weights. The `tokenizer.json` of `transformers` is read, too."""
    checkpoint, size = tmp_path / "checkpoint", len(WITH_UNUSED)
    cls_id, sep_id = (WITH_UNUSED.index(token) for token in ("[CLS]", "[SEP]"))
    config = replace(TINY, vocab_size=size, max_positions=64, cls_id=cls_id, sep_id=sep_id)
    save_checkpoint(AlbertForTasks(config, {"fill-mask": size}), checkpoint)
    write_vocabulary(checkpoint, WITH_UNUSED)
    export_bundle(checkpoint, tmp_path / "bundle")
    hf_tokenizer = transformers.BertTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForMaskedLM.from_pretrained(checkpoint)
    pipeline = transformers.pipeline("fill-mask", model=model, tokenizer=hf_tokenizer, top_k=3)
    with AlbertClient.local(tmp_path / "bundle") as client:
        answers: Any = client.fill_mask("今天[MASK]很好", top_k=3)
        assert client.info().mask_token == "[MASK]"
    for answer, expected in zip(answers, pipeline("今天[MASK]很好"), strict=True):
        assert answer.score == pytest.approx(expected.pop("score"), abs=1e-5)
        assert {name: getattr(answer, name) for name in expected} == expected
    hf_tokenizer.save_pretrained(checkpoint)
    (checkpoint / "vocab.txt").unlink(missing_ok=True)
    with open_checkpoint(checkpoint) as opened:
        tokenizer = AlbertTokenizer.from_file(opened.folder / "tokenizer.json")
    text = "今天天气很好。"
    assert tokenizer.encode(text).ids == hf_tokenizer(text)["input_ids"]
    assert (tokenizer.cls_id, tokenizer.pad_id) == (WITH_UNUSED.index("[CLS]"), 0)
