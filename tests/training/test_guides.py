"""The commands of documents that train work as printed, at small sizes."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.printed import printed_commands, run_printed
from tests.training.support import WIKI, read_metrics
from training.model.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow

PRETRAINING = "docs/pretraining.md"
TINY_SIZES = "--embedding-size 16 --hidden-size 32 --layers 2 --heads 2"
TWO_STEPS = "--batch-size 2 --steps 2 --report-every 1 --no-compile"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the corpus that the document names."""
    (tmp_path / "wiki").mkdir()
    for name in ("train.jsonl.xz", "validation.jsonl.xz"):
        (tmp_path / "wiki" / name).write_bytes(lzma.compress(WIKI.read_bytes()))
    return tmp_path


def test_pretraining(clone: Path) -> None:
    commands = [
        *printed_commands(PRETRAINING, "serve prepare"),
        *printed_commands(PRETRAINING, "--recipe paper"),
    ]
    assert len(commands) == 4
    appended = {
        "vocab": "--vocab-size 800",
        "pretrain": f"{TINY_SIZES} {TWO_STEPS} --validate-every 1",
    }
    run_printed(commands, clone, appended)
    settings = {
        name: json.loads((clone / "runs" / name / "run.json").read_text())["settings"]
        for name in ("base", "small")
    }
    assert [settings[name]["optimizer"] for name in ("base", "small")] == ["lamb", "muon"]
    for name in settings:
        assert [line["step"] for line in read_metrics(clone / "runs" / name)][-1] == 2
        assert load_checkpoint(clone / "runs" / name / "checkpoint").config.vocab_size == 800
    order = printed_commands(PRETRAINING, "--order-share 0.25")
    run_printed(order, clone, {"pretrain": TWO_STEPS})
    model = load_checkpoint(clone / "runs" / "ordered" / "checkpoint")
    assert {"fill-mask", "sentence-order"} <= model.tasks.keys()


LANGUAGES = {
    "german": "Der Bär kommt über die Straße. Die Maus ist schön. Äpfel und Öl sind neu.",
    "hindi": "यह मेरा घर है। हिन्दी में किताब पढ़ी। वह काम करता है।",
    "chinese": "今天天气很好。我们去北京。他在上海的学校看书。",
}
SIZES = {"german": 44, "hindi": 37, "chinese": 34}
SMALL = {
    "pretrain": "--budget 1h --steps 2 --batch-size 2 --length 32 --max-positions 32 "
    "--embedding-size 16 --hidden-size 32 --layers 1 --heads 2 --no-compile",
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_commands_lead_from_a_text_to_a_bundle(language: str, tmp_path: Path) -> None:
    text = LANGUAGES[language]
    (tmp_path / f"{language}.txt").write_text("\n\n".join([text] * 30), encoding="utf-8")
    *commands, serve = printed_commands("docs/languages.md", f"{language}-vocab")
    small = {**SMALL, "vocab": f"--vocab-size {SIZES[language]}"}
    run_printed([*commands, serve.replace("serve --bundle", "info")], tmp_path, small)
    tokenizer = AlbertTokenizer.from_file(tmp_path / "bundles" / language / "tokenizer.json")
    ids = tokenizer.encode_plain(text).ids
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids, keep_special=False) == text
