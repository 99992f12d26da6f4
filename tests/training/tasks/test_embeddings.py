"""Vectors are learnt from pairs, triplets and scores, and measured by similarity and retrieval."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import pearsonr, rankdata

from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime.engine import Engine
from albert_serve.tasks import load_setups
from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import our_model, read_metrics, validations, write
from training.commands import finetune
from training.commands.evaluate import main
from training.data.batch import ExampleBatch, TokenisedExample
from training.data.collate import collate_examples
from training.data.corpus import CorpusError
from training.data.streams import ExampleStream
from training.errors import RunError
from training.loop.distributed import World
from training.model.checkpoint import load_checkpoint
from training.tasks.base import TrainingSetup, TrainingTask
from training.tasks.embeddings.files import SimilarTexts, read_similar
from training.tasks.embeddings.loss import EmbeddingConfig, read_vectors, sentence_vectors
from training.tasks.embeddings.metrics import (
    Embedder,
    Vectors,
    retrieval_metrics,
    similarity_metrics,
)

Capture = pytest.CaptureFixture[str]


def pair(*texts: str, score: float | None = None) -> SimilarTexts:
    return SimilarTexts(texts=texts, score=score, location="")


def angles(degrees: Mapping[str, float]) -> Vectors:
    radians = np.radians(list(degrees.values()))
    return np.stack([np.cos(radians), np.sin(radians)], 1).astype(np.float32)


def test_spearman_is_pearson_of_ranks_of_which_equal_ones_have_their_mean() -> None:
    degrees = {"a": 0.0, "b": 10.0, "c": 40.0, "d": 90.0, "e": 130.0}
    others, scores = ["b", "b", "c", "d", "e"], [5.0, 4.0, 4.0, 1.0, 2.0]
    pairs = [pair("a", other, score=score) for other, score in zip(others, scores, strict=True)]
    figures = similarity_metrics(pairs, lambda texts: angles({t: degrees[t] for t in texts}))
    cosines = np.cos(np.radians([degrees[other] for other in others]))
    expected = pearsonr(rankdata(cosines), rankdata(scores)).statistic
    assert figures["embeddings_spearman"] == pytest.approx(expected, abs=1e-6)
    pearson = pearsonr(cosines, scores).statistic
    assert figures["embeddings_pearson"] == pytest.approx(pearson, abs=1e-6)
    assert figures["embeddings_pairs"] == 5


def test_retrieval_is_counted_as_by_hand() -> None:
    """Candidates at 0, 10, ..., 110 degrees, of which a third text of a row matches nothing."""
    degrees = {f"c{n}": 10.0 * n for n in range(12)} | {"q": 1.0, "r": 14.0, "far": 110.0, "s": 52}
    pairs = [pair("q", "c0"), pair("q", "c6"), pair("q", "c0"), pair("r", "c2"), pair("far", "c0")]
    pairs += [pair("s", f"c{n}", f"c{n + 1}") for n in (1, 3, 5, 7, 9)] + [pair("s", "c11")]

    def embed(texts: Sequence[str]) -> Vectors:
        assert len(set(texts)) == len(texts)
        return angles({text: degrees[text] for text in texts})

    figures = retrieval_metrics(pairs, embed)
    ranks = [[1, 7], [2], [12], [9, 5, 1, 4, 8, 12]]  # of the matches of q, r, far and s
    for k in (1, 5, 10):
        recalls = [np.mean([rank <= k for rank in its]) for its in ranks]
        assert figures[f"embeddings_recall_at_{k}"] == pytest.approx(np.mean(recalls))
    assert figures["embeddings_mrr_at_10"] == pytest.approx((1 + 1 / 2 + 0 + 1) / 4)
    assert (figures["embeddings_queries"], figures["embeddings_candidates"]) == (4, 12)


def test_vectors_that_are_all_the_same_find_nothing() -> None:
    pairs = [pair(f"query {n}", f"answer {n}") for n in range(20)]
    figures = retrieval_metrics(pairs, lambda texts: angles(dict.fromkeys(texts, 30.0)))
    assert figures["embeddings_recall_at_10"] == figures["embeddings_mrr_at_10"] == 0


STSB = "genre\tfile\t2012\t0001\t{}\tA man sings.\tA man is singing.{}"


def test_scored_pairs_have_a_header_or_are_read_by_order(tmp_path: Path) -> None:
    for name, lines in (
        ("sts.tsv", [STSB.format(4.5, ""), STSB.format(1, "\tsource\tsource")]),
        ("order.tsv", [f"A man sings.\tA man is singing.\t{score}" for score in (4.5, 1)]),
        (
            "sick.csv",
            [
                "pair_ID,Sentence_a,SENTENCE_B,Relatedness_Score,entailment_judgment",
                *(f"1,A man sings.,A man is singing.,{score},NEUTRAL" for score in (4.5, 1)),
            ],
        ),
    ):
        pairs = read_similar([write(tmp_path / name, "\n".join(lines))])
        assert {pair.texts for pair in pairs} == {("A man sings.", "A man is singing.")}
        assert [pair.score for pair in pairs] == [4.5, 1]


def test_texts_are_read_by_order_or_from_named_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", "a\tb\nc\td")
    assert [pair.texts for pair in read_similar([file])] == [("a", "b"), ("c", "d")]
    file = write(tmp_path / "b.tsv", "a\tb\tc\nd\te\tf")
    assert [pair.texts for pair in read_similar([file])] == [("a", "b", "c"), ("d", "e", "f")]
    file = write(tmp_path / "c.csv", "x,y,Label,score\na,b,0.5,1\n")
    for columns, texts, score in (
        (("y", "x"), ("b", "a"), None),
        (("x", "y", "label"), ("a", "b"), 0.5),
    ):
        [pair] = read_similar([file], columns)
        assert (pair.texts, pair.score) == (texts, score)


def read_task(
    setup: TrainingSetup, file: Path, validation: Sequence[Path] = (), batch_size: int = 3
) -> TrainingTask:
    config = EmbeddingConfig(files=[file], validation=validation, columns=())
    return read_vectors(config, setup, batch_size)


def test_losses_and_validation_are_those_of_their_definitions(
    setup: TrainingSetup, tmp_path: Path
) -> None:
    """Texts equal to an anchor's positive are not its negatives; equal scores have no order."""
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
    scores = [3, 2, 1, 1]
    errors = [(cosine - score) ** 2 for cosine, score in zip(cosines, scores, strict=True)]
    assert sums.loss.item() == pytest.approx(sum(errors), rel=1e-4)
    assert sums.count == 4
    assert sums.logits is not None
    assert sums.logits.flatten().tolist() == pytest.approx(cosines, abs=1e-5)

    # CoSENTLoss of sentence-transformers, of the same pairs.
    task = read_task(setup, files[1], batch_size=4)
    sums = task.losses["embeddings"](model.train(), batch)["embeddings"]
    differences = [cosines[i] - cosines[j] for i, j in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1))]
    loss = math.log(1 + sum(math.exp(20 * difference) for difference in differences))
    assert sums.loss.item() / sums.count == pytest.approx(loss, rel=1e-4)
    num_right = sum(difference < 0 for difference in differences)
    assert 0 < num_right < 5
    assert sums.right.item() / sums.count == pytest.approx(num_right / 5)

    # MultipleNegativesRankingLoss, of the triplets.
    task = read_task(setup, files[0])
    (stream,) = task.streams
    assert isinstance(stream, ExampleStream)
    batch = stream.pack(stream.examples, 16)
    assert isinstance(batch, ExampleBatch)
    sums = task.losses["embeddings"](model, batch)["embeddings"]
    with torch.no_grad():
        vectors = sentence_vectors(model, batch).double().view(3, 3, -1).transpose(0, 1)
    texts = ["good", "good", "river", "war", "city", "a game"]
    losses, num_right = [], 0
    for own, anchor in enumerate(vectors[0]):
        logits = [20 * float(anchor @ candidate) for candidate in vectors[1:].flatten(0, 1)]
        others = [n for n, text in enumerate(texts) if n == own or text != texts[own]]
        losses.append(math.log(sum(math.exp(logits[n]) for n in others)) - logits[own])
        num_right += max(others, key=lambda n: logits[n]) == own
    assert sums.loss.item() == pytest.approx(sum(losses), rel=1e-4)
    assert (sums.right.item(), sums.count) == (num_right, 3)


def test_a_step_of_each_process_is_one_micro_batch(
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


def test_a_checkpoints_figures_are_those_of_the_bundle_that_the_service_opens(
    checkpoint_dir: Path, bundle_dir: Path, tmp_path: Path
) -> None:
    rows = ["A run,A second run,0.9", "A run,An out,0.1", "A base,The game,0.4"]
    pairs = write(tmp_path / "pairs.csv", "\n".join(["sentence1,sentence2,score", *rows]))
    output, answers = tmp_path / "figures.json", tmp_path / "answers.csv"
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
        figures = json.loads(output.read_text())
        assert figures["embeddings_pearson"] == pytest.approx(expected, abs=1e-3)
        assert figures["embeddings_candidates"] == 2


THINGS = ("The game", "A city", "His music", "Her work", "Their school")
SAME = (("was good.", "was great."), ("was lost in the war.", "died in the war."))
PAIRS = [(f"{thing} {one}", f"{thing} {other}") for thing in THINGS for one, other in SAME]
TRIPLETS = [
    (*pair, negative) for pair, (_, negative) in zip(PAIRS, PAIRS[2:] + PAIRS[:2], strict=True)
]
SCORED = [
    (first, second, str(5.0 * (pair == other)))
    for (pair, (first, _)), (other, (_, second)) in product(enumerate(PAIRS), repeat=2)
]
DATA: dict[str, tuple[str, Sequence[tuple[str, ...]]]] = {
    "pairs": ("anchor\tpositive", PAIRS),
    "triplets": ("anchor\tpositive\tnegative", TRIPLETS),
    "scores": ("sentence1\tsentence2\tscore", SCORED),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a file of each kind of texts."""
    for name, (header, rows) in DATA.items():
        lines = [header, *("\t".join(row) for row in rows)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.process
@pytest.mark.parametrize("name", ["triplets", "scores"])
def test_vectors_are_learnt_from_examples(
    name: str, data: Path, start: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [*start, "--embeddings", str(data / f"{name}.tsv")]
    held_out = ["--validation", str(data / "scores.tsv"), "--validate-every", "10"]
    size = ["--batch-size", "10", "--steps", "40", "--lr", "3e-3"]
    assert finetune.main([*options, *held_out, *size, "--output", str(run)]) == 0
    loss = "embeddings/loss"
    first, *_, last = [line[loss] for line in read_metrics(run) if loss in line]
    assert last < first
    # The highest possible is 0.52: a tenth of the pairs have the one score, the rest the other.
    assert max(validations(run, "embeddings", "spearman").values()) > 0.4


def test_files_of_several_kinds_and_without_the_columns_are_refused(data: Path) -> None:
    with pytest.raises(CorpusError, match="The files have several kinds of texts"):
        read_similar([data / "pairs.tsv", data / "triplets.tsv"])
    with pytest.raises(CorpusError, match=r"no column a or b\. Its columns are anchor"):
        read_similar([data / "pairs.tsv"], ("a", "b"))


@pytest.mark.process
def test_a_vector_is_the_normalised_mean_of_all_tokens(pretrained: Path) -> None:
    folder = pretrained / "checkpoint"
    tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
    encodings = [tokenizer.encode(text) for text in (PAIRS[0][0], PAIRS[3][1], "A city")]
    examples = [TokenisedExample(ids=each.ids, types=each.types, target=0) for each in encodings]
    batch = collate_examples("embeddings", examples, row_length=32)
    model: Any = transformers.AlbertModel.from_pretrained(folder)
    with torch.no_grad():
        vectors_CH = sentence_vectors(load_checkpoint(folder).eval(), batch)
        for vector_H, each in zip(vectors_CH, encodings, strict=True):
            states_SH = model(input_ids=torch.tensor([each.ids])).last_hidden_state[0]
            expected_H = torch.nn.functional.normalize(states_SH.mean(0), dim=-1)
            torch.testing.assert_close(vector_H, expected_H, atol=1e-5, rtol=0)
