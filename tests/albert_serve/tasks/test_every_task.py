"""All tasks: errors, limits of cost, and truncation; metadata and metrics of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from albert_serve.api.schemas import MAX_MASKS, TaskRequest
from albert_serve.bundle.manifest import Manifest
from albert_serve.errors import InvalidInputError, NoMaskError, TextTooLongError, TooMuchAtOnceError
from albert_serve.tasks import TASKS, EncoderInput, Prepared, TaskSetup, open_task, prepare_request
from albert_serve.tasks.description import read_metadata, read_quality
from albert_serve.tasks.text_length import text_length
from tests.albert_serve.support import ITEMS

LONG = "a " * 200
# Items that are too long for 128 tokens, and how many of their tokens are truncated.
LONG_ITEMS: Final[list[tuple[str, Any, int]]] = [
    ("fill-mask", f"[MASK] {LONG}", 203 - 128),
    ("text-classification", {"text": "b", "text_pair": LONG}, 205 - 128),
    ("question-answering", {"question": LONG, "context": "a b c"}, 200 - 64),
    ("sentence-order", {"text": LONG, "text_pair": "b"}, 205 - 128),
    ("feature-extraction", LONG, 202 - 128),
]
NO_CONTEXT: Final = {"question": "a", "context": "\u0301"}  # the accent has no letter


def read(task: str, inputs: Any, **parameters: Any) -> TaskRequest:
    return TASKS[task].request.model_validate({"inputs": inputs, "parameters": parameters})


def prepare(setup: TaskSetup, task: str, inputs: Any, **parameters: Any) -> list[Prepared[Any]]:
    return prepare_request(open_task(task, setup), read(task, inputs, **parameters))


@pytest.mark.parametrize(
    ("task", "long_item", "num_truncated"), LONG_ITEMS, ids=[task for task, *_ in LONG_ITEMS]
)
def test_a_long_text_is_rejected_or_truncated_and_counted(
    task: str, long_item: Any, num_truncated: int, task_setup: TaskSetup
) -> None:
    items = [ITEMS[task], long_item]
    with pytest.raises(TextTooLongError, match=r"^inputs\[1\]: .*truncation"):
        prepare(task_setup, task, items)
    untruncated, truncated = prepare(task_setup, task, items, truncation=True)
    assert (untruncated.num_truncated, truncated.num_truncated) == (0, num_truncated)
    assert max(len(item.ids) for item in truncated.inputs) <= 128


def test_a_text_may_have_as_many_tokens_as_the_model_has_positions(task_setup: TaskSetup) -> None:
    pair = {"text": "a " * 65, "text_pair": "a " * 60}
    order = {"text": "a " * 3, "text_pair": "a " * 122}
    cases: list[tuple[str, Any, Any]] = [
        ("text-classification", "a " * 126, "a " * 127),
        ("text-classification", pair, {**pair, "text_pair": "a " * 61}),
        ("sentence-order", order, {**order, "text": "a " * 4}),
    ]
    for task, longest, too_long in cases:
        [prepared] = prepare(task_setup, task, longest)
        assert len(prepared.inputs[0].ids) == 128
        with pytest.raises(TextTooLongError, match=r"129 tokens.* at most 128"):
            prepare(task_setup, task, too_long)


@pytest.mark.parametrize(
    ("task", "inputs", "parameters", "error", "message"),
    [
        ("fill-mask", "a", {}, NoMaskError, r"\[MASK\]"),
        ("fill-mask", f"{LONG}[MASK]", {"truncation": True}, NoMaskError, "first 128 tokens"),
        ("text-classification", "a", {"head": "x"}, InvalidInputError, "'x'.* default"),
        ("text-classification", " \n", {}, InvalidInputError, "^text is empty"),
        ("token-classification", "\u0301", {}, InvalidInputError, "^text is empty"),
        ("question-answering", NO_CONTEXT, {}, InvalidInputError, "^context is empty"),
        ("sentence-order", {"sentences": ["a", "\u0301"]}, {}, InvalidInputError, "1. is empty"),
    ],
)
def test_an_item_that_cannot_be_answered_is_rejected_with_the_reason(
    task: str, inputs: Any, parameters: Any, error: Any, message: str, task_setup: TaskSetup
) -> None:
    with pytest.raises(error, match=message):
        prepare(task_setup, task, inputs, **parameters)


class CountingTask:
    """A task that counts its items. All items have the same cost."""

    def __init__(self, num_tokens: int = 1, num_masks: int = 1, answer_bytes: int = 0) -> None:
        item = EncoderInput(ids=[0] * num_tokens, types=[], task="fill-mask", rows=[0] * num_masks)
        self.prepared: Prepared[Any] = Prepared(
            inputs=[item], finish=list, answer_bytes=answer_bytes
        )
        self.num_items = 0

    def prepare(self, item: Any, parameters: Any) -> Prepared[Any]:
        self.num_items += 1
        return self.prepared


@pytest.mark.parametrize(
    ("task", "limit", "message"),
    [
        (CountingTask(num_tokens=500), 2, "1000 tokens"),
        (CountingTask(num_masks=128), 8, f"{MAX_MASKS} "),
        (CountingTask(answer_bytes=1 << 23), 8, "67108864 bytes"),
    ],
    ids=["tokens", "masks", "bytes"],
)
def test_the_sum_of_a_request_is_limited(task: CountingTask, limit: int, message: str) -> None:
    """Items after the first one beyond the limit are not prepared."""
    task.num_items = 0
    at_limit = prepare_request(task, read("fill-mask", ["a"] * limit), max_tokens=1000)
    assert len(at_limit) == task.num_items == limit
    with pytest.raises(TooMuchAtOnceError, match=message):
        prepare_request(task, read("fill-mask", ["a"] * 3 * limit), max_tokens=1000)
    assert task.num_items == limit + limit + 1


def test_characters_are_limited_before_any_item_is_encoded() -> None:
    task = CountingTask()
    for max_tokens, num_chars in ((10, 1_000_000), (40_000, 1_280_000)):
        texts = ["x" * (num_chars // 2)] * 2
        assert prepare_request(task, read("fill-mask", texts), max_tokens=max_tokens)
        task.num_items = 0
        with pytest.raises(TooMuchAtOnceError, match=f"at most {num_chars} "):
            prepare_request(task, read("fill-mask", [*texts, "x"]), max_tokens=max_tokens)
        assert task.num_items == 0


def test_a_reply_may_have_token_embeddings_of_6_texts_of_512_tokens(task_setup: TaskSetup) -> None:
    setup = replace(task_setup, max_positions=512, hidden_size=384)
    texts = ["a " * 510] * 6
    assert prepare(setup, "feature-extraction", texts, pooling="none")
    with pytest.raises(TooMuchAtOnceError, match="more than 67108864 bytes"):
        prepare(setup, "feature-extraction", [*texts, texts[0]], pooling="none")
    # An entry counts 500 bytes, and the tokens or the characters of its text.
    context = {"question": "a", "context": "a a a"}
    answers: list[tuple[str, Any, dict[str, Any], int]] = [
        ("fill-mask", "[MASK] [MASK]", {"top_k": 3}, 2 * 3 * (500 + 8 * 4)),
        ("question-answering", context, {"top_k": 9, "max_answer_len": 2}, 6 * (500 + 3)),
        ("question-answering", context, {"top_k": 4}, 4 * (500 + 5)),
        ("sentence-order", {"sentences": ["a"] * 4}, {}, 3 * 500),
        ("token-classification", "a a a", {}, 3 * 500),
    ]
    for task, item, parameters, num_bytes in answers:
        [prepared] = prepare(task_setup, task, item, **parameters)
        assert prepared.answer_bytes == num_bytes


def test_questions_have_limits_of_spans_and_of_repeated_reading(task_setup: TaskSetup) -> None:
    longest, too_long = ({"question": "a", "context": "a " * n} for n in (32_768, 32_769))
    assert prepare(task_setup, "question-answering", longest, max_answer_len=512)
    with pytest.raises(InvalidInputError, match="max_answer_len to 511"):
        prepare(task_setup, "question-answering", too_long, max_answer_len=512)
    read_often, read_more = ({"question": "a " * 12, "context": "a " * n} for n in (128, 129))
    assert prepare(task_setup, "question-answering", read_often, doc_stride=112)
    with pytest.raises(InvalidInputError, match="17 windows of 128 tokens that share 112"):
        prepare(task_setup, "question-answering", read_more, doc_stride=112)


@pytest.mark.parametrize(
    ("question", "context", "option", "highest", "message"),
    [
        ("a " * 4, "a " * 130, "max_seq_len", 128, "max_seq_len is 129.* at most 128"),
        ("a " * 200, "a " * 16, "max_question_len", 124, "no room"),
        ("a " * 10, "a " * 130, "doc_stride", 114, "doc_stride is 115.* 115 tokens.* 114"),
    ],
)
def test_length_options_of_questions_have_limits_that_follow_from_the_model(
    question: str, context: str, option: str, highest: int, message: str, task_setup: TaskSetup
) -> None:
    item = {"question": question, "context": context}
    [prepared] = prepare(task_setup, "question-answering", item, **{option: highest})
    assert max(len(window.ids) for window in prepared.inputs) == 128
    assert prepared.num_truncated == max(0, len(question.split()) - 124)
    with pytest.raises(InvalidInputError, match=message):
        prepare(task_setup, "question-answering", item, **{option: highest + 1})


def test_windows_of_a_context_have_384_tokens_and_overlap_by_128(task_setup: TaskSetup) -> None:
    """The overlap is at most half of the tokens next to a long question.

    Windows of a text have all tokens that the model reads.
    """
    heads = {"question-answering": task_setup.head}
    setup = replace(task_setup, max_positions=512, heads=heads)
    for num_question, stride in ((1, 252), (125, 128), (181, 100)):
        item = {"question": "a " * num_question, "context": "a " * 1000}
        [prepared] = prepare(setup, "question-answering", item)
        *lengths, last = [len(window.ids) for window in prepared.inputs]
        assert lengths == [384] * len(lengths)
        assert last == num_question + 3 + 1000 - len(lengths) * stride
    [prepared] = prepare(setup, "token-classification", "a " * 1000)
    assert [len(window.ids) for window in prepared.inputs] == [512, 512, 2 + 1000 - 2 * 382]


def test_metadata_is_read_from_the_yaml_block_of_the_card(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\nlanguage: [en, no]\nbase_model: a/b\n---\n# Title\n")
    expected = {"license": "mit", "language": ["en", "no"], "base_model": ["a/b"]}
    assert {name: value for name, value in read_metadata(tmp_path).items() if value} == expected
    for damaged in ("# Title\n\nlicense: mit\n", "---\nlicense: [\n---\n", "---\n- license\n---\n"):
        card.write_text(damaged)
        assert not any(read_metadata(tmp_path).values())


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"texts": 7, "accuracy": 0.8, "macro_f1": 0.7}, ("accuracy", 80, 7)),
        ({"texts": 7, "micro_f1": 0.5, "subset_accuracy": 0.3}, ("micro-F1", 50, 7)),
        ({"texts": 7, "pearson": -0.25, "spearman": 0.8, "mse": 1.5}, ("Pearson", -25, 7)),
        ({"accuracy": 0.8}, None),
    ],
)
def test_the_quality_of_a_classifier_is_the_main_metric_of_its_kind(
    metrics: dict[str, Any], expected: tuple[str, float, int] | None
) -> None:
    evaluation = {f"text_classification_{name}": value for name, value in metrics.items()}
    manifest = Manifest.model_validate(
        {"config": {}, "heads": {}, "files": {}, "evaluation": evaluation}
    )
    quality = read_quality(manifest, "text-classification")
    assert (quality and (quality.metric, quality.percent, quality.count)) == expected


def test_the_text_length_is_the_length_of_the_last_training() -> None:
    """Without training, the text length is the number of positions."""
    classifier, topic = "text-classification", "text-classification/topic"
    stages: list[object] = [
        {"tasks": [classifier], "settings": {"length": "64", "embeddings": ["pairs.csv"]}},
        {"tasks": [topic], "settings": {"length": 96}},
        {"tasks": [classifier, "fill-mask"], "settings": {"length": "128", "embeddings": "None"}},
        {"tasks": [classifier], "settings": {"length": "0"}},
    ]
    lengths = {classifier: 128, topic: 96, "feature-extraction": 64, "fill-mask": 512}
    for head, length in lengths.items():
        assert text_length(head, {"stages": stages}, 512) == length
        assert text_length(head, {"stages": stages}, 48) == 48
        assert text_length(head, None, 512) == 512
