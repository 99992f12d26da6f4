"""Token classification: equality with the pipeline of `transformers`, and differences."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any, get_args

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

# Several scripts: with marks, without spaces, from right to left, emoji, white space.
PARTS = [
    *("Anna Berg", "(Berlin)", "O'Brien,", "the first inning", "1932", "e\u0301te\u0301", "½ cup"),
    *("Ζυρίχη", "Москва", "ירושלים", "القاهرة", "दिल्ली", "서울", "東京に行く", "กรุงเทพ"),
    *("👩‍👩‍👧", "☃️", "naïve", "ANNA", "user@mail.example", "  ", "\t", "\n", "ﷺ", "[MASK]", "Ⅷ"),
]
PLAIN = ["Anna", "Berg", "lives", "in", "Zürich", "the", "inning", "a", "Été", "Music"]


class PipelineWithOurWords(TokenClassificationPipeline):
    """The pipeline with our words. Its own words end at spaces only."""

    our_tokenizer: AlbertTokenizer

    def gather_pre_entities(self, sentence: str, *args: Any, **kwargs: Any) -> Any:
        entities = super().gather_pre_entities(sentence, *args, **kwargs)
        offsets = self.our_tokenizer.encode_plain(sentence).offsets
        starts = {word.start for word in find_words(sentence, offsets)}
        return [{**token, "is_subword": n not in starts} for n, token in enumerate(entities)]


def random_texts(parts: list[str], count: int) -> list[str]:
    generator = random.Random(0)
    return [" ".join(generator.choices(parts, k=generator.randint(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def engine(token_checkpoint_dir: Path) -> TorchEngine:
    return TorchEngine(load_checkpoint(token_checkpoint_dir))


@pytest.fixture(scope="module")
def task(tokenizer: AlbertTokenizer) -> TokenClassification:
    entry = HeadEntry(graph="a.onnx", num_outputs=len(TOKEN_LABELS), labels=TOKEN_LABELS)
    heads = {"token-classification": entry}
    return TokenClassification(
        TaskSetup(tokenizer=tokenizer, max_positions=128, hidden_size=64, heads=heads)
    )


def find_entities(
    task: TokenClassification, engine: TorchEngine, text: str, **options: Any
) -> list[Any]:
    prepared = task.prepare(text, TokenClassificationParameters(**options))
    return [item.model_dump() for item in prepared.finish(engine.run(prepared.inputs))]


def assert_equal(entities: list[Any], hf_entities: list[Any], text: str) -> None:
    """Compare entities. Our words are copied from the text, and end after combining marks."""
    names = ("entity", "entity_group", "index", "start")
    for ours, hf in zip(entities, hf_entities, strict=True):
        assert {n: ours.get(n) for n in names} == {n: hf.get(n) for n in names}, text
        assert ours["score"] == pytest.approx(hf["score"], abs=1e-5)
        marks = text[hf["end"] : ours["end"]]
        assert all(unicodedata.category(char)[0] == "M" for char in marks), text
        is_copied = "entity_group" in ours or hf["word"] == "<unk>"
        assert ours["word"] == (text[ours["start"] : ours["end"]] if is_copied else hf["word"])


@pytest.fixture(scope="module")
def cases(token_checkpoint_dir: Path, tokenizer: AlbertTokenizer) -> list[tuple[Any, list[str]]]:
    """The unchanged pipeline with plain words, and the pipeline with our words with any text.

    In the pipeline, a lone "▁" and an unknown token are words, so plain words have neither.
    """
    model = transformers.AutoModelForTokenClassification.from_pretrained(token_checkpoint_dir)
    hf_tokenizer: Any = transformers.AutoTokenizer.from_pretrained(token_checkpoint_dir)
    classes: list[Any] = [TokenClassificationPipeline, PipelineWithOurWords]
    plain_pipeline, pipeline_with_our_words = (
        pipeline_class(model=model, tokenizer=hf_tokenizer, device="cpu")
        for pipeline_class in classes
    )
    pipeline_with_our_words.our_tokenizer = tokenizer
    word_ids = {tokenizer.token_id("▁"), tokenizer.unk_id}
    words = [word for word in PLAIN if word_ids.isdisjoint(tokenizer.encode_plain(word).ids)]
    assert len(words) >= 5
    return [
        (plain_pipeline, random_texts(words, 60)),
        (pipeline_with_our_words, random_texts(PARTS, 210)),
    ]


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", get_args(AggregationStrategy))
def test_entities_equal_transformers(
    strategy: str, cases: Any, task: TokenClassification, engine: TorchEngine
) -> None:
    labels = set()
    for pipeline, texts in cases:
        for number, text in enumerate(filter(str.strip, texts)):
            ignored = ["O"] if number % 2 else []
            options = {"aggregation_strategy": strategy, "ignore_labels": ignored}
            entities = find_entities(task, engine, text, **options)
            assert_equal(entities, pipeline(text, **options), text)
            labels |= {entity.get("entity") or entity["entity_group"] for entity in entities}
    assert len(labels) >= 3


def test_a_long_text_is_read_to_its_end_and_each_token_is_returned_once(
    task: TokenClassification, engine: TorchEngine
) -> None:
    """The overlap of the windows does not matter."""
    text = " ".join(random_texts(PLAIN, 200))
    num_windows = []
    for stride in (None, 0, 62, 63):
        options: dict[str, Any] = {
            "aggregation_strategy": "none",
            "ignore_labels": [],
            "stride": stride,
        }
        parameters = TokenClassificationParameters.model_validate(options)
        num_windows.append(len(task.prepare(text, parameters).inputs))
        tokens = find_entities(task, engine, text, **options)
        assert [token["index"] for token in tokens] == list(range(1, len(tokens) + 1))
        assert tokens[-1]["end"] == len(text)
    default, separate, overlapping, half = num_windows
    assert separate == -(-len(tokens) // 126) < overlapping < half == default
    with pytest.raises(InvalidInputError, match=r"stride is 64.* 126 .* at most 63"):
        find_entities(task, engine, text, stride=64)


def test_words_have_punctuation_only_inside_or_in_abbreviations(tokenizer: AlbertTokenizer) -> None:
    """The pipeline reads "(Berlin)," as one word, whose first token is the bracket."""
    text = "in (Berlin), O'Brien's U.K. for Clacton-on-Sea; St. a.b. iPad中"
    offsets = tokenizer.encode_plain(text).offsets
    words = [text[offsets[w[0]][0] : offsets[w[-1]][1]] for w in find_words(text, offsets)]
    expected = ["in", "Berlin", "O'Brien's", "U.K.", "for", "Clacton-on-Sea", "St.", "a.b."]
    expected += ["iPad", "中"]
    assert [word for word in words if word[0].isalpha()] == expected


def test_entities_of_tags_equal_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics.sequence_labeling")
    tags = ["O", *(f"{prefix}-{label}" for prefix in "BIES" for label in ("PER", "LOC"))]
    generator = np.random.default_rng(0)
    for _ in range(300):
        sequence = generator.choice(tags, generator.integers(1, 12)).tolist()
        entities = [tuple(span) for span in find_spans(sequence) if span.label != "O"]
        assert entities == seqeval.get_entities(sequence), sequence
