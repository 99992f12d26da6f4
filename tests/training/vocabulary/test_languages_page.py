"""The commands of docs/languages.md work as printed, at small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.printed import printed_commands, run_printed

TEXTS = {
    "german": "Der Bär kommt über die Straße. Die Maus ist schön. Äpfel und Öl sind neu.",
    "hindi": "यह मेरा घर है। हिन्दी में किताब पढ़ी। वह काम करता है।",
    "chinese": "今天天气很好。我们去北京。他在上海的学校看书。",
}
SIZES = {"german": 44, "hindi": 37, "chinese": 34}
SMALL = {
    "pretrain": "--budget 1h --steps 2 --batch-size 2 --length 32 --max-positions 32 "
    "--embedding-size 16 --hidden-size 32 --layers 1 --heads 2 --no-compile",
    "export": "--quality-budget 2s",
}


@pytest.mark.slow
@pytest.mark.parametrize("language", TEXTS)
def test_the_commands_lead_from_a_text_to_a_bundle(language: str, tmp_path: Path) -> None:
    text = TEXTS[language]
    (tmp_path / f"{language}.txt").write_text("\n\n".join([text] * 30), encoding="utf-8")
    *commands, serve = printed_commands("docs/languages.md", f"{language}-vocab")
    small = {**SMALL, "vocab": f"--vocab-size {SIZES[language]}"}
    run_printed([*commands, serve.replace("serve --bundle", "info")], tmp_path, small)
    tokenizer = AlbertTokenizer.from_file(tmp_path / "bundles" / language / "tokenizer.json")
    ids = tokenizer.encode_plain(text).ids
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids, keep_special=False) == text
