"""Token classification against the pipeline of `transformers`, and the differences."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import TokenClassificationPipeline

from albert_serve.api.schemas import AggregationStrategy, TokenClassificationParameters
from albert_serve.bundle.manifest import HeadEntry
from albert_serve.errors import InvalidInputError
from albert_serve.tasks import TaskSetup, TokenClassification
from albert_serve.tasks.token_classification.entities import find_spans, find_words
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.conftest import TOKEN_LABELS
from tests.albert_serve.support import TorchEngine
from training.model.checkpoint import load_checkpoint

# Of several scripts: with marks, without spaces, from right to left, emoji, white space.
PARTS = [
    *("Anna Berg", "(Berlin)", "O'Brien,", "the first inning", "1932", "e\u0301te\u0301", "½ cup"),
    *("Ζυρίχη", "Москва", "ירושלים", "القاهرة", "दिल्ली", "서울", "東京に行く", "กรุงเทพ"),
    *("👩‍👩‍👧", "☃️", "naïve", "ANNA", "user@mail.example", "  ", "\t", "\n", "ﷺ", "[MASK]", "Ⅷ"),
]
PLAIN = ["Anna", "Berg", "lives", "in", "Zürich", "the", "inning", "a", "Été", "Music"]
STRATEGIES: list[AggregationStrategy] = ["none", "simple", "first", "average", "max"]


class WithOurWords(TokenClassificationPipeline):
    """The pipeline, whose words are ours: it takes what spaces divide, punctuation and all."""

    tokenizer_of_ours: AlbertTokenizer

    def gather_pre_entities(self, sentence: str, *arguments: Any, **named: Any) -> Any:
        entities = super().gather_pre_entities(sentence, *arguments, **named)
        offsets = self.tokenizer_of_ours.encode_plain(sentence).offsets
        begins = {word.start for word in find_words(sentence, offsets)}
        return [{**token, "is_subword": n not in begins} for n, token in enumerate(entities)]


def texts_of(parts: list[str], count: int) -> list[str]:
    generator = random.Random(0)
    return [" ".join(generator.choices(parts, k=generator.randint(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokens_engine(token_checkpoint_dir: Path) -> TorchEngine:
    return TorchEngine(load_checkpoint(token_checkpoint_dir))


@pytest.fixture(scope="module")
def task(tokenizer: AlbertTokenizer) -> TokenClassification:
    entry = HeadEntry(graph="a.onnx", num_outputs=len(TOKEN_LABELS), labels=TOKEN_LABELS)
    heads = {"token-classification": entry}
    return TokenClassification(
        TaskSetup(tokenizer=tokenizer, max_positions=128, hidden_size=64, heads=heads)
    )


def ours(task: TokenClassification, engine: TorchEngine, text: str, **options: Any) -> list[Any]:
    prepared = task.prepare(text, TokenClassificationParameters(**options))
    return [item.model_dump() for item in prepared.finish(engine.run(prepared.inputs))]


def assert_equal(got: list[Any], expected: list[Any], text: str) -> None:
    """Compare answers; `word` of entities is the text's here, and a mark is with its letter."""
    names = ("entity", "entity_group", "index", "start")
    for one, other in zip(got, expected, strict=True):
        assert {n: one.get(n) for n in names} == {n: other.get(n) for n in names}, text
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)
        between = text[other["end"] : one["end"]]
        assert all(unicodedata.category(char)[0] == "M" for char in between), text
        if "entity_group" in one:
            assert one["word"] == text[one["start"] : one["end"]]
        elif one["word"] != text[one["start"] : one["end"]]:  # an unknown token's characters
            assert one["word"] == other["word"]


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_entities_are_those_of_transformers(
    strategy: AggregationStrategy,
    token_checkpoint_dir: Path,
    task: TokenClassification,
    tokens_engine: TorchEngine,
    tokenizer: AlbertTokenizer,
) -> None:
    """The pipeline as it is on words that spaces divide, and with our words on any text.

    A mark of a space alone is a word by itself there, and an unknown token too.
    """
    model = transformers.AutoModelForTokenClassification.from_pretrained(token_checkpoint_dir)
    fast: Any = transformers.AutoTokenizer.from_pretrained(token_checkpoint_dir)
    plain: Any = TokenClassificationPipeline
    other: Any = WithOurWords
    plain, other = (kind(model=model, tokenizer=fast, device="cpu") for kind in (plain, other))
    other.tokenizer_of_ours = tokenizer
    labels, pieces = set(), {word: tokenizer.encode_plain(word).ids for word in PLAIN}
    lone = {tokenizer.token_id("▁"), tokenizer.unk_id}
    words = [word for word in PLAIN if lone.isdisjoint(pieces[word])]
    assert len(words) >= 5
    for kind, texts in ((plain, texts_of(words, 60)), (other, texts_of(PARTS, 210))):
        for number, text in enumerate(filter(str.strip, texts)):
            ignored = ["O"] if number % 2 else []
            options = {"aggregation_strategy": strategy, "ignore_labels": ignored}
            got = ours(task, tokens_engine, text, **options)
            assert_equal(got, kind(text, **options), text)
            labels |= {one.get("entity") or one["entity_group"] for one in got}
    assert len(labels) >= 3


def test_a_long_text_is_read_to_its_end_and_no_entity_is_double(
    task: TokenClassification, tokens_engine: TorchEngine
) -> None:
    """Each token is returned once, whatever part of a window is shared."""
    text = " ".join(texts_of(PLAIN, 200))
    num_windows = []
    for stride in (None, 0, 62, 63):
        options = TokenClassificationParameters(stride=stride)
        num_windows.append(len(task.prepare(text, options).inputs))
        tokens = ours(
            *(task, tokens_engine, text),
            aggregation_strategy="none",
            ignore_labels=[],
            stride=stride,
        )
        assert [one["index"] for one in tokens] == list(range(1, len(tokens) + 1))
        assert tokens[-1]["end"] == len(text)
    default, separate, overlapping, half = num_windows
    assert separate == -(-len(tokens) // 126) < overlapping < half == default
    with pytest.raises(InvalidInputError, match=r"stride is 64.* 126 .* at most 63"):
        ours(task, tokens_engine, text, stride=64)


def test_punctuation_is_no_part_of_an_entity(tokenizer: AlbertTokenizer) -> None:
    """The pipeline has "(Berlin)," as one word, whose first token is the bracket.

    Inside a word punctuation is part of it, and so is the full stop of an abbreviation.
    """
    text = "in (Berlin), O'Brien's U.K. for Clacton-on-Sea; St. a.b."
    offsets = tokenizer.encode_plain(text).offsets
    words = [text[offsets[w[0]][0] : offsets[w[-1]][1]] for w in find_words(text, offsets)]
    expected = ["in", "Berlin", "O'Brien's", "U.K.", "for", "Clacton-on-Sea", "St.", "a.b."]
    assert [word for word in words if word[0].isalpha()] == expected


def test_entities_of_tags_are_those_of_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics.sequence_labeling")
    tags = ["O", *(f"{prefix}-{label}" for prefix in "BIES" for label in ("PER", "LOC"))]
    generator = np.random.default_rng(0)
    for _ in range(300):
        sequence = generator.choice(tags, generator.integers(1, 12)).tolist()
        entities = [tuple(span) for span in find_spans(sequence) if span.label != "O"]
        assert entities == seqeval.get_entities(sequence), sequence
