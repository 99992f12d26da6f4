"""Embeddings learn from pairs, triplets and scores; similarity and retrieval measure them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from scipy.stats import pearsonr, rankdata

from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime.engine import Engine
from albert_serve.tasks import load_setups
from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import our_model, read_metrics, read_validations, write
from training.commands import finetune
from training.commands.evaluate import main
from training.data.batch import ExampleBatch, TokenisedExample
from training.data.collate import collate_examples
from training.data.streams import ExampleStream
from training.errors import RunError
from training.loop.distributed import World
from training.model.checkpoint import load_checkpoint
from training.tasks.base import TrainingSetup, TrainingTask
from training.tasks.embeddings.files import SimilarTexts, read_similar
from training.tasks.embeddings.loss import EmbeddingConfig, read_vectors, sentence_vectors
from training.tasks.embeddings.metrics import Embedder, retrieval_metrics, similarity_metrics

Capture = pytest.CaptureFixture[str]


def pair(*texts: str, score: float | None = None) -> SimilarTexts:
    return SimilarTexts(texts=texts, score=score, location="")


def angles(degrees: Mapping[str, float]) -> NDArray[np.float32]:
    radians = np.radians(list(degrees.values()))
    return np.stack([np.cos(radians), np.sin(radians)], 1).astype(np.float32)


def test_spearman_is_the_pearson_correlation_of_mean_ranks() -> None:
    degrees = {"a": 0.0, "b": 10.0, "c": 40.0, "d": 90.0, "e": 130.0}
    seconds, scores = ["b", "b", "c", "d", "e"], [5.0, 4.0, 4.0, 1.0, 2.0]
    pairs = [pair("a", text, score=score) for text, score in zip(seconds, scores, strict=True)]
    metrics = similarity_metrics(pairs, lambda texts: angles({t: degrees[t] for t in texts}))
    cosines = np.cos(np.radians([degrees[text] for text in seconds]))
    spearman = pearsonr(rankdata(cosines), rankdata(scores)).statistic
    assert metrics["embeddings_spearman"] == pytest.approx(spearman, abs=1e-6)
    pearson = pearsonr(cosines, scores).statistic
    assert metrics["embeddings_pearson"] == pytest.approx(pearson, abs=1e-6)
    assert metrics["embeddings_pairs"] == 5


def test_metrics_of_retrieval_match_values_by_hand() -> None:
    """Candidates are at 0, 0, 10, ..., 110 degrees. The third text of a row matches no query.

    Of candidates with equal cosines, the match ranks last.
    """
    degrees = {f"c{n}": 10.0 * n for n in range(12)} | {"q": 1.0, "r": 14.0, "far": 110.0, "s": 52}
    degrees |= {"copy": 0.0, "farther": 115.0}
    pairs = [pair("q", "c0"), pair("q", "c6"), pair("q", "c0"), pair("r", "c2"), pair("far", "c2")]
    pairs += [pair("s", f"c{n}", f"c{n + 1}") for n in (1, 3, 5, 7, 9)] + [pair("s", "c11")]
    pairs += [pair("farther", "c1", "copy")]

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        assert len(set(texts)) == len(texts)
        return angles({text: degrees[text] for text in texts})

    metrics = retrieval_metrics(pairs, embed)
    # Ranks of the matches of q, r, far, s and farther.
    ranks = [[2, 8], [2], [10], [9, 5, 1, 4, 8, 13], [11]]
    for k in (1, 5, 10):
        recalls = [np.mean(np.array(query_ranks) <= k) for query_ranks in ranks]
        assert metrics[f"embeddings_recall_at_{k}"] == pytest.approx(np.mean(recalls))
    assert metrics["embeddings_mrr_at_10"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 10 + 1 + 0) / 5)
    assert (metrics["embeddings_queries"], metrics["embeddings_candidates"]) == (5, 13)


FIRST, SECOND = "A man sings.", "A man is singing."
STSB = f"genre\tfile\t2012\t0001\t{{}}\t{FIRST}\t{SECOND}{{}}"
SICK = "pair_ID,Sentence_a,SENTENCE_B,Relatedness_Score,entailment_judgment"
SAME_PAIRS = [((FIRST, SECOND), 4.5), ((FIRST, SECOND), 1)]


@pytest.mark.parametrize(
    ("name", "lines", "columns", "expected"),
    [
        ("sts.tsv", [STSB.format(4.5, ""), STSB.format(1, "\tsource\tsource")], (), SAME_PAIRS),
        ("order.tsv", [f"{FIRST}\t{SECOND}\t4.5", f"{FIRST}\t{SECOND}\t1"], (), SAME_PAIRS),
        ("sick.csv", [SICK, f"1,{FIRST},{SECOND},4.5,", f"2,{FIRST},{SECOND},1,"], (), SAME_PAIRS),
        ("a.tsv", ["a\tb", "c\td"], (), [(("a", "b"), None), (("c", "d"), None)]),
        ("b.tsv", ["a\tb\tc", "d\te\tf"], (), [(("a", "b", "c"), None), (("d", "e", "f"), None)]),
        ("c.csv", ["x,y,Label,score", "a,b,0.5,1"], ("y", "x"), [(("b", "a"), None)]),
        ("d.csv", ["x,y,Label,score", "a,b,0.5,1"], ("x", "y", "LABEL"), [(("a", "b"), 0.5)]),
        ("e.csv", ["anchor,positive,negative,score", "a,b,c,1"], (), [(("a", "b", "c"), None)]),
    ],
)
def test_texts_and_scores_are_read_by_header_by_order_or_from_named_columns(
    tmp_path: Path, name: str, lines: list[str], columns: tuple[str, ...], expected: list[Any]
) -> None:
    pairs = read_similar([write(tmp_path / name, "\n".join(lines))], columns)
    assert [(pair.texts, pair.score) for pair in pairs] == expected


def read_task(
    setup: TrainingSetup, file: Path, validation: Sequence[Path] = (), batch_size: int = 3
) -> TrainingTask:
    config = EmbeddingConfig(files=[file], validation=validation, columns=())
    return read_vectors(config, setup, batch_size)


def test_losses_and_validation_match_definitions(setup: TrainingSetup, tmp_path: Path) -> None:
    """A text that equals an anchor's positive is not its negative. Equal scores have no order."""
    triplets = ["anchor,positive,negative", "a,good,war", "king,good,city", "music,river,a game"]
    scored = ["sentence1,sentence2,score", "a,war,3", "king,the city,2", "a,king,1", "he,she,1"]
    files = [write(tmp_path / f"{len(rows)}.csv", "\n".join(rows)) for rows in (triplets, scored)]
    torch.manual_seed(0)
    model = our_model(setup.architecture, ())
    task = read_task(setup, files[0], files[1:])
    assert task.validation is not None
    (batch,) = task.validation.batches
    assert isinstance(batch, ExampleBatch)
    with torch.no_grad():
        firsts, seconds = sentence_vectors(model, batch).double().view(4, 2, -1).unbind(1)
        sums = task.losses["embeddings"](model.eval(), batch)["embeddings"]
    cosines = (firsts * seconds).sum(-1).tolist()
    squared_error = np.square(np.subtract(cosines, [3, 2, 1, 1])).sum()
    assert sums.loss.item() == pytest.approx(squared_error, rel=1e-4)
    assert sums.count == 4
    assert sums.logits is not None
    assert sums.logits.flatten().tolist() == pytest.approx(cosines, abs=1e-5)

    # CoSENTLoss of sentence-transformers for the same pairs.
    cosent = read_task(setup, files[1], batch_size=4).losses["embeddings"]
    sums, scored_batch = cosent(model.train(), batch)["embeddings"], batch
    differences = [cosines[i] - cosines[j] for i, j in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1))]
    loss = math.log(1 + sum(math.exp(20 * difference) for difference in differences))
    assert sums.loss.item() / sums.count == pytest.approx(loss, rel=1e-4)
    num_right = sum(difference < 0 for difference in differences)
    assert 0 < num_right < 5
    assert sums.right.item() / sums.count == pytest.approx(num_right / 5)

    # MultipleNegativesRankingLoss of sentence-transformers for the triplets.
    task = read_task(setup, files[0])
    (stream,) = task.streams
    assert isinstance(stream, ExampleStream)
    batch = cast("ExampleBatch", stream.pack(stream.examples, 16))
    sums = task.losses["embeddings"](model, batch)["embeddings"]
    with torch.no_grad():
        vectors = sentence_vectors(model, batch).double().view(3, 3, -1).transpose(0, 1)
    texts = ["good", "good", "river", "war", "city", "a game"]
    losses, num_right = [], 0
    for positive, anchor in enumerate(vectors[0]):
        logits = [20 * float(anchor @ candidate) for candidate in vectors[1:].flatten(0, 1)]
        candidates = [n for n, text in enumerate(texts) if n == positive or text != texts[positive]]
        losses.append(math.log(sum(math.exp(logits[n]) for n in candidates)) - logits[positive])
        num_right += max(candidates, key=lambda n: logits[n]) == positive
    assert sums.loss.item() == pytest.approx(sum(losses), rel=1e-4)
    assert (sums.right.item(), sums.count) == (num_right, 3)

    # Pairs with equal cosines, here 0, are in no order.
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert cosent(model, scored_batch)["embeddings"].right.item() == 0


def test_examples_are_compared_within_the_micro_batch_of_a_process(
    setup: TrainingSetup, tmp_path: Path, capsys: Capture
) -> None:
    file = write(tmp_path / "a.csv", "anchor,positive\n" + "a city,a river\n" * 8)
    setup = replace(setup, world=World(size=2), micro_batch_size=2)
    read_task(setup, file, batch_size=5)
    assert "compares the 2 examples within each process" in capsys.readouterr().out
    with pytest.raises(RunError, match="Use --batch-size 4, or a shorter --length"):
        read_task(setup, file, batch_size=6)
    pairs = write(tmp_path / "b.csv", "query,answer\na,b\n")
    with pytest.raises(RunError, match="--validation of embeddings requires pairs with a score"):
        read_task(setup, file, [pairs])


def test_a_checkpoint_and_its_bundle_have_the_same_metrics(
    checkpoint_dir: Path, bundle_dir: Path, tmp_path: Path
) -> None:
    rows = ["A run,A second run,0.9", "A run,An out,0.1", "A base,The game,0.4"]
    pairs = write(tmp_path / "pairs.csv", "\n".join(["sentence1,sentence2,score", *rows]))
    output, answers = tmp_path / "metrics.json", tmp_path / "answers.csv"
    answers.write_text("query,answer\nA run,A second run\nA base,The game\n")
    arguments = ["--similarity", str(pairs), "--retrieval", str(answers)]
    bundle = Bundle.open(bundle_dir)
    texts = ["A run", "A second run", "An out", "A base", "The game"]
    setup = load_setups(bundle)["feature-extraction"]
    vectors = Embedder(runner=Engine.open(bundle), setup=setup)(texts)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    cosines = [vectors[a] @ vectors[b] for a, b in ((0, 1), (0, 2), (3, 4))]
    expected = pearsonr(cosines, [0.9, 0.1, 0.4]).statistic
    for folder in (checkpoint_dir, bundle_dir):
        command = [str(folder), *arguments, "--output", str(output)]
        assert main(command) == 0
        metrics = json.loads(output.read_text())
        assert metrics["embeddings_pearson"] == pytest.approx(expected, abs=1e-3)
        assert metrics["embeddings_candidates"] == 2


THINGS = ("The game", "A city", "His music", "Her work", "Their school")
SYNONYMS = (("was good.", "was great."), ("was lost in the war.", "died in the war."))
PAIRS = [(f"{thing} {a}", f"{thing} {b}") for thing in THINGS for a, b in SYNONYMS]
TRIPLETS = [(*pair, other) for pair, (_, other) in zip(PAIRS, PAIRS[2:] + PAIRS[:2], strict=True)]
SCORED = [
    (first, second, str(5.0 * (row == column)))
    for (row, (first, _)), (column, (_, second)) in product(enumerate(PAIRS), repeat=2)
]
DATA: dict[str, tuple[str, Sequence[tuple[str, ...]]]] = {
    "triplets": ("anchor\tpositive\tnegative", TRIPLETS),
    "scores": ("sentence1\tsentence2\tscore", SCORED),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a file of each kind of examples."""
    for name, (header, rows) in DATA.items():
        write(tmp_path / f"{name}.tsv", "\n".join([header, *map("\t".join, rows)]))
    return tmp_path


@pytest.mark.process
@pytest.mark.parametrize("name", ["triplets", "scores"])
def test_a_run_learns_embeddings(
    name: str, data: Path, short_finetune_options: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [*short_finetune_options, "--embeddings", str(data / f"{name}.tsv")]
    held_out = ["--validation", str(data / "scores.tsv"), "--validate-every", "10"]
    size = ["--batch-size", "10", "--steps", "40", "--lr", "3e-3"]
    assert finetune.main([*options, *held_out, *size, "--output", str(run)]) == 0
    loss = "embeddings/loss"
    first, *_, last = [line[loss] for line in read_metrics(run) if loss in line]
    assert last < first
    # The maximum is 0.52, because a tenth of the pairs have one score and the rest the other.
    assert max(read_validations(run, "embeddings", "spearman").values()) > 0.4


@pytest.mark.process
def test_an_embedding_is_the_normalised_mean_of_all_tokens(pretrained_run: Path) -> None:
    folder = pretrained_run / "checkpoint"
    tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
    encodings = [tokenizer.encode(text) for text in (PAIRS[0][0], PAIRS[3][1], "A city")]
    examples = [TokenisedExample(ids=e.ids, types=e.types, target=0) for e in encodings]
    batch = collate_examples("embeddings", examples, row_length=32)
    model: Any = transformers.AlbertModel.from_pretrained(folder)
    with torch.no_grad():
        vectors_CH = sentence_vectors(load_checkpoint(folder).eval(), batch)
        for vector_H, encoding in zip(vectors_CH, encodings, strict=True):
            states_SH = model(input_ids=torch.tensor([encoding.ids])).last_hidden_state[0]
            expected_H = torch.nn.functional.normalize(states_SH.mean(0), dim=-1)
            torch.testing.assert_close(vector_H, expected_H, atol=1e-5, rtol=0)
