"""Scorers of rows: each row has its result, in files, tables, iterators and pipelines."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars
import pyarrow
import pytest
from pyarrow import dataset, parquet

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.sentence_vectors import SentenceVectors
from albert_serve.errors import BundleMissingError, EngineError, InvalidInputError, NotFoundError
from albert_serve.scoring import AlbertScorer
from albert_serve.scoring.dataset import score_dataset
from albert_serve.scoring.errors import TooManyErrorsError
from albert_serve.scoring.job import score_files
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions
from albert_serve.settings import CACHE_VARIABLE, RuntimeOptions
from albert_serve.tasks import EncoderInput, Logits, TaskSetup, open_task
from albert_serve.tasks.base import Runner
from tests.albert_serve.scoring.jobs import HashScorer, labels_of, read_jsonl, write_jsonl
from tests.albert_serve.support import Answerer, TorchEngine

pytestmark = pytest.mark.process


class Watched(TorchEngine):
    """Notes the batches, and fails on any that holds the poisonous token."""

    def __init__(self, engine: TorchEngine, poison: int | None = None) -> None:
        super().__init__(engine.model, engine.max_batch_tokens)
        self.poison = poison
        self.batches: list[list[int]] = []

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        self.batches.append([len(item.ids) for item in inputs])
        if any(self.poison in item.ids for item in inputs):
            raise EngineError("poison")
        return super().run(inputs)


Score = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def score(engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path) -> Score:
    """Scores rows of a task, keeps their ids, and gives the results."""

    def run(
        task: str, rows: Sequence[object], runner: Runner = engine, **parameters: Any
    ) -> list[dict[str, Any]]:
        source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        options = ScoreOptions(parameters=parameters, keep=["id"])
        score_files(LocalScorer(runner, task, task_setup), [source], output, options)
        return read_jsonl(output)

    return run


def test_rows_keep_their_order_and_their_ids(
    score: Score, answer: Answerer, task_setup: TaskSetup, sentences: list[str]
) -> None:
    rows = [{"id": i, "text": text, "rating": 3} for i, text in enumerate(sentences)]
    results = score("text-classification", rows, top_k=None)
    task = open_task("text-classification", task_setup)
    for row, result in zip(rows, results, strict=True):
        labels = answer(task.prepare(row["text"], TextClassificationParameters()))
        expected = [label.model_dump() for label in labels]
        assert result == {"id": row["id"], "output": expected}


@pytest.mark.parametrize(
    ("task", "item", "fields"),
    [
        ("fill-mask", {"text": "a [MASK]"}, {"score", "token", "token_str", "sequence"}),
        ("text-classification", {"text": "a", "text_pair": "b"}, {"label", "score"}),
        ("question-answering", {"question": "q", "context": "c"}, {"answer", "score"}),
        ("sentence-order", {"text": "a", "text_pair": "b"}, {"in_order"}),
        ("sentence-order", {"sentences": ["a", "b", "c"]}, {"pairs", "coherence"}),
    ],
)
def test_bare_fields_and_inputs_are_the_same(
    task: str, item: dict[str, Any], fields: set[str], score: Score
) -> None:
    inputs: Any = item["text"] if list(item) == ["text"] else item
    rows = [item, {"inputs": None, **item}, {"inputs": inputs}, {"inputs": [inputs, inputs]}]
    bare, also_bare, one, several = score(task, rows)
    assert bare == also_bare == one
    assert several["output"] == [one["output"]] * 2
    best = one["output"][0] if isinstance(one["output"], list) else one["output"]
    assert set(best) >= fields


def trained(task: str, length: int) -> dict[str, Any]:
    """A manifest's part about training."""
    settings = {"length": length, "embeddings": "True" if task == "feature-extraction" else None}
    return {"stages": [{"tasks": [task], "settings": settings}]}


LONG = "run " * 40


@pytest.mark.parametrize("task", ["text-classification", "feature-extraction"])
def test_long_texts_are_truncated_to_the_length_of_training(
    task: str, engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    scorer = LocalScorer(engine, task, task_setup, training=trained(task, 16))
    name = "truncate" if task == "feature-extraction" else "truncation"
    rows: list[object] = [{"text": text} for text in ("run", LONG, "run " * 14, "run " * 15)]
    rows += [{"text": LONG, "parameters": {name: False}}]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    summary = score_files(scorer, [source], output)
    assert [row.get("truncated_tokens") for row in read_jsonl(output)] == [None, 26, None, 1, None]
    truncated, omitted = summary.long_texts()
    assert truncated.startswith("2 of 5 texts were truncated to 16 tokens (--no-truncation ")
    assert omitted.startswith("1 of 5 texts were omitted, because they have more than 16 tokens (")
    strict = score_files(scorer, [source], output, ScoreOptions(truncation=False))
    assert (strict.num_truncated, strict.errors_by_type) == (0, {"too_long": 3})
    assert read_jsonl(output)[1]["error_type"] == "too_long"


def test_vectors_of_tokens_and_of_untrained_tasks_have_all_positions(
    score: Score, engine: TorchEngine, task_setup: TaskSetup
) -> None:
    training = trained("feature-extraction", 16)
    scorer = LocalScorer(engine, "feature-extraction", task_setup, training=training)
    positions = task_setup.max_positions
    assert scorer.text_length({"pooling": "none"}) == positions
    assert scorer.text_length({}) == 16
    for task in ("text-classification", "fill-mask"):
        scorer = LocalScorer(engine, task, task_setup, training=training)
        assert scorer.text_length({}) == positions
    answerer = LocalScorer(engine, "question-answering", task_setup)
    assert answerer.text_length({}) == min(positions, 384) // 2
    assert answerer.text_length({"max_seq_len": 60}) == 30
    assert answerer.text_length({"max_seq_len": 60, "truncation": False}) == 56
    assert answerer.text_length({"max_seq_len": 60, "max_question_len": 7}) == 7
    short = replace(task_setup, sentence_vectors=SentenceVectors(max_length=9))
    embedder = LocalScorer(engine, "feature-extraction", short, training=training)
    assert embedder.text_length({}) == 9
    assert embedder.text_length({"pooling": "none"}) == positions
    assert LocalScorer(engine, "fill-mask", short).text_length({}) == positions


def test_parts_of_token_vectors_are_smaller(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    scorer = LocalScorer(engine, "feature-extraction", task_setup)
    for pooling, num_rows, num_parts in (("mean", 129, 1), ("none", 128, 1), ("none", 129, 2)):
        source = write_jsonl(tmp_path / "in.jsonl", [{"text": "run " * 128}] * num_rows)
        options = ScoreOptions(parameters={"pooling": pooling}, keep=[])
        output = tmp_path / f"{pooling}-{num_rows}.jsonl"
        assert score_files(scorer, [source], output, options).num_parts == num_parts


def test_a_bad_row_fails_alone(score: Score) -> None:
    rows: list[tuple[object, str]] = [
        ({"text": "a [MASK]"}, "fine"),
        ("{not json", "malformed"),
        ("", "skipped"),
        ("[1]", "malformed"),
        ("NaN", "malformed"),
        ('{"id": 1e400, "text": "a [MASK]"}', "malformed"),
        ({"id": 7, "text": "no mask"}, "no_mask"),
        ({"id": None, "other": 1}, "invalid_input"),
        ({"text": 5}, "invalid_input"),
        ({"text": "a [MASK]", "parameters": {"top_k": 0}}, "invalid_input"),
        ({"text": "a [MASK]", "parameters": 5}, "invalid_input"),
        ({"inputs": ["a [MASK]", "none"]}, "no_mask"),
        ({"id": "\ud800", "text": "\ud800 [MASK]"}, "invalid_input"),
        ({"text": "[MASK] " + "a " * 300, "parameters": {"truncation": False}}, "too_long"),
        ({"text": ""}, "no_mask"),
        ({"text": "b [MASK]"}, "fine"),
    ]
    results = score("fill-mask", [row for row, _ in rows])
    expected = [kind for _, kind in rows if kind != "skipped"]
    assert [row.get("error_type", "fine") for row in results] == expected
    assert results[1]["error"].startswith("line 2 is not JSON")
    assert results[2]["error"] == "line 4 is not a JSON object."
    assert results[5]["id"] == 7
    assert results[6]["error"] == "The row has neither inputs nor text."
    assert results[10]["error"].startswith("inputs[1]: ")
    assert results[11]["id"] == "\N{REPLACEMENT CHARACTER}"


def test_a_row_that_breaks_the_engine_fails_alone(
    score: Score, engine: TorchEngine, task_setup: TaskSetup
) -> None:
    watched = Watched(engine, poison=task_setup.tokenizer.token_id("€"))
    rows = [{"id": i, "text": "a €" if i == 5 else f"text {i}"} for i in range(20)]
    results = score("text-classification", rows, watched)
    assert [row["id"] for row in results] == list(range(20))
    assert [row["id"] for row in results if "error" in row] == [5]
    assert results[5] == {"id": 5, "error": "poison", "error_type": "engine"}


def test_rows_of_like_lengths_run_together_within_the_budget(
    score: Score, engine: TorchEngine
) -> None:
    watched = Watched(engine)
    rows = [{"text": "word " * (1 + (i * 37) % 100)} for i in range(60)]
    score("text-classification", rows, watched, truncation="truncate")
    assert sum(map(len, watched.batches)) == 60
    assert all(len(batch) * max(batch) <= 8 * 512 for batch in watched.batches)
    in_order = [length for batch in watched.batches for length in batch]
    assert in_order == sorted(in_order, reverse=True)
    assert len(watched.batches) < 30


def test_notes_and_parameters_of_a_row_are_its_own(score: Score) -> None:
    rows = [
        {"text": "[MASK] " + "word " * 300, "parameters": {"truncation": True}},
        {"text": "a [MASK]", "parameters": {"targets": "supervolcanoes"}},
        {"text": "a [MASK]", "parameters": {"top_k": 3}},
    ]
    cut, replaced, several = score("fill-mask", rows, top_k=2)
    assert [len(row["output"]) for row in (cut, replaced, several)] == [2, 1, 3]
    assert cut["truncated_tokens"] > 0
    assert "Its first piece" in replaced["warnings"][0]
    assert several.keys() == {"output"}


PARAMETERS: Final = {"top_k": 1, "truncation": False}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def table(sentences: list[str]) -> pyarrow.Table:
    texts = ["too long " * 300, *sentences[:7], sentences[0]]
    return pyarrow.table({"id": range(9), "review": texts, "rating": [0.5] * 9})


@pytest.fixture
def scorer(bundle_dir: Path) -> AlbertScorer:
    return AlbertScorer(
        bundle_dir,
        "text-classification",
        parameters=PARAMETERS,
        columns={"text": "review"},
        keep=["id"],
    )


def test_a_batch_of_each_kind_has_the_columns_of_parquet(
    table: pyarrow.Table, scorer: AlbertScorer, bundle_dir: Path, tmp_path: Path
) -> None:
    parquet.write_table(table, tmp_path / "in.parquet")
    options = ScoreOptions(parameters=PARAMETERS, columns={"text": "review"}, keep=["id"])
    engine = LocalScorer.open(bundle_dir, "text-classification", RuntimeOptions(num_threads=1))
    score_files(engine, [tmp_path / "in.parquet"], tmp_path / "out.parquet", options)
    expected = parquet.read_table(tmp_path / "out.parquet")
    assert scorer.schema(table.schema) == expected.schema
    assert scorer(table).equals(expected)
    assert expected.column("error_type").to_pylist() == ["too_long", *[None] * 8]
    assert pyarrow.Table.from_batches([scorer(table.to_batches()[0])]).equals(expected)
    frame = scorer(table.to_pandas().set_index(np.arange(9, 18)))
    assert isinstance(frame, type(table.to_pandas()))
    assert list(frame.columns) == expected.column_names
    assert frame["label"].tolist()[1:] == expected.column("label").to_pylist()[1:]
    arrays = scorer({name: np.asarray(table.column(name)) for name in table.column_names})
    assert list(arrays) == expected.column_names
    assert arrays["id"].tolist() == list(range(9))
    assert arrays["labels"][1][0] == expected.column("labels").to_pylist()[1][0]


def test_batches_are_read_as_their_answers_are(table: pyarrow.Table, scorer: AlbertScorer) -> None:
    none = table.slice(0, 0)
    batches = iter([table.to_batches()[0], none, none.to_pandas()])
    scored = scorer.map(batches)
    assert next(scored).num_rows == 9
    empty = next(scored)
    assert (empty.num_rows, empty.schema) == (0, scorer.schema(table.schema))
    assert len(next(batches)) == 0  # which `scored` has not read


def test_only_its_configuration_is_pickled(table: pyarrow.Table, scorer: AlbertScorer) -> None:
    size = len(pickle.dumps(scorer))
    expected = scorer(table)
    content = pickle.dumps(scorer)
    assert len(content) == size < 1000
    again = pickle.loads(content)
    assert again(table).equals(expected)


def test_errors_of_a_worker_are_raised(
    table: pyarrow.Table, bundle_dir: Path, tmp_path: Path
) -> None:
    task, columns = "text-classification", {"text": "review"}
    with pytest.raises(InvalidInputError, match="parameters: top_k"):  # before a worker has it
        AlbertScorer(bundle_dir, task, parameters={"top_k": 0})
    with pytest.raises(InvalidInputError, match="no field 'review'"):
        AlbertScorer(bundle_dir, task, columns={"review": "text"})
    with pytest.raises(NotFoundError, match="Unknown task 'spelling'"):
        AlbertScorer(bundle_dir, "spelling")
    with pytest.raises(InvalidInputError, match="has no column 'text'"):
        AlbertScorer(bundle_dir, task).schema(table.schema)
    with pytest.raises(BundleMissingError, match=r"^on \S+: .*nowhere"):
        AlbertScorer(tmp_path / "nowhere", "fill-mask", columns=columns)(table)
    with pytest.raises(NotFoundError, match=r"^on \S+: .* has no token-classification"):
        AlbertScorer(bundle_dir, "token-classification", columns=columns)(table)
    with pytest.raises(TooManyErrorsError, match=r"9 of 9 rows failed\. The first error: "):
        AlbertScorer(bundle_dir, "fill-mask", columns=columns, errors="fail")(table)


def test_an_iterator_is_read_as_its_answers_are() -> None:
    read = []

    def rows() -> Iterator[object]:
        for number in range(30):
            read.append(number)
            yield {"id": number, "text": f"text {number}"} if number else "a text"

    scored = score_dataset(rows(), HashScorer(), ScoreOptions(part_rows=10))
    assert read == []
    assert next(scored) == {"text": "a text", "output": labels_of("a text")}
    assert len(read) == 10
    assert next(scored) == {"id": 1, "text": "text 1", "output": labels_of("text 1")}
    assert len(list(scored)) == 28


def test_a_table_is_read_as_its_answers_are(tmp_path: Path) -> None:
    table = pyarrow.table({"id": range(50), "review": [f"text {i % 7}" for i in range(50)]})
    parquet.write_table(table, tmp_path / "one.parquet")
    scorer = HashScorer()
    options = ScoreOptions(
        columns={"text": "review"}, keep=["id"], part_rows=8, parameters={"top_k": None}
    )
    tables = (table, table.to_reader(), dataset.dataset(tmp_path), table.to_pandas())
    for data in (*tables, polars.from_arrow(table)):
        reader = score_dataset(data, scorer, options)
        assert reader.schema.names[:3] == ["id", "label", "score"]
        scored = reader.read_all()
        assert scored.column("id").num_chunks == 7  # of at most 8 rows
        assert scored.column("id").to_pylist() == list(range(50))
        expected = [labels_of(f"text {i % 7}") for i in range(50)]
        assert scored.column("labels").to_pylist() == expected
    assert len(scorer.texts) == 5 * 50


def test_what_is_no_table_is_refused() -> None:
    class Frame:
        columns = ("text",)

    for data in (Frame(), {"text": "a"}, "a"):
        with pytest.raises(InvalidInputError, match="is neither an iterable of rows nor a table"):
            score_dataset(data, HashScorer())
    binary = pyarrow.table({"text": pyarrow.chunked_array([[b"a", b"b"], [b"\xff"]])})
    with pytest.raises(InvalidInputError, match=r"^row 3 or a later row: The binary column"):
        score_dataset(binary, HashScorer()).read_all()
    with pytest.raises(InvalidInputError, match="The table has no column 'text'"):
        score_dataset(pyarrow.table({"review": ["a"]}), HashScorer())
