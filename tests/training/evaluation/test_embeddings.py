"""Similarity is SciPy's correlation of cosines; recall and reciprocal ranks are as by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr, rankdata

from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.sentence_vectors import SentenceVectors, write_sentence_vectors
from albert_serve.runtime.engine import Engine
from albert_serve.tasks import load_setups
from training.commands.evaluate import main
from training.tasks.embeddings.files import SimilarTexts, read_similar
from training.tasks.embeddings.metrics import (
    Embedder,
    Vectors,
    retrieval_figures,
    similarity_figures,
)

Capture = pytest.CaptureFixture[str]


def pair(*texts: str, score: float | None = None) -> SimilarTexts:
    return SimilarTexts(texts=texts, score=score, place="")


def angles(degrees: Mapping[str, float]) -> Vectors:
    radians = np.radians(list(degrees.values()))
    return np.stack([np.cos(radians), np.sin(radians)], 1).astype(np.float32)


def test_spearman_is_pearson_of_ranks_of_which_equal_ones_have_their_mean() -> None:
    degrees = {"a": 0.0, "b": 10.0, "c": 40.0, "d": 90.0, "e": 130.0}
    others, scores = ["b", "b", "c", "d", "e"], [5.0, 4.0, 4.0, 1.0, 2.0]
    pairs = [pair("a", other, score=score) for other, score in zip(others, scores, strict=True)]
    figures = similarity_figures(pairs, lambda texts: angles({t: degrees[t] for t in texts}))
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

    figures = retrieval_figures(pairs, embed)
    ranks = [[1, 7], [2], [12], [9, 5, 1, 4, 8, 12]]  # of the matches of q, r, far and s
    for k in (1, 5, 10):
        recalls = [np.mean([rank <= k for rank in its]) for its in ranks]
        assert figures[f"embeddings_recall_at_{k}"] == pytest.approx(np.mean(recalls))
    assert figures["embeddings_mrr_at_10"] == pytest.approx((1 + 1 / 2 + 0 + 1) / 4)
    assert (figures["embeddings_queries"], figures["embeddings_candidates"]) == (4, 12)


def test_vectors_that_are_all_the_same_find_nothing() -> None:
    pairs = [pair(f"query {n}", f"answer {n}") for n in range(20)]
    figures = retrieval_figures(pairs, lambda texts: angles(dict.fromkeys(texts, 30.0)))
    assert figures["embeddings_recall_at_10"] == figures["embeddings_mrr_at_10"] == 0


STSB = "genre\tfile\t2012\t0001\t{}\tA man sings.\tA man is singing.{}"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("sts.tsv", [STSB.format(4.5, ""), STSB.format(1, "\tsource\tsource")]),
        (
            "order.tsv",
            ["A man sings.\tA man is singing.\t4.5", "A man sings.\tA man is singing.\t1"],
        ),
        (
            "sick.csv",
            [
                "pair_ID,Sentence_a,SENTENCE_B,Relatedness_Score,entailment_judgment",
                "1,A man sings.,A man is singing.,4.5,NEUTRAL",
                "2,A man sings.,A man is singing.,1,NEUTRAL",
            ],
        ),
    ],
)
def test_scored_pairs_have_a_header_or_are_read_by_order(
    tmp_path: Path, name: str, lines: list[str]
) -> None:
    file = tmp_path / name
    file.write_text("\n".join(lines))
    pairs = read_similar([file])
    assert {each.texts for each in pairs} == {("A man sings.", "A man is singing.")}
    assert [each.score for each in pairs] == [4.5, 1]


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.csv"
    rows = ["A run,A second run,0.9", "A run,An out,0.1", "A base,The game,0.4"]
    file.write_text("\n".join(["sentence1,sentence2,score", *rows]))
    return file


@pytest.mark.parametrize("form", [None, SentenceVectors(pooling="cls")])
def test_a_checkpoints_figures_are_those_of_the_bundle_that_the_service_opens(
    form: SentenceVectors | None,
    checkpoint_dir: Path,
    bundle_dir: Path,
    pairs_file: Path,
    tmp_path: Path,
) -> None:
    output, answers = tmp_path / "figures.json", tmp_path / "answers.csv"
    answers.write_text("query,answer\nA run,A second run\nA base,The game\n")
    arguments = ["--similarity", str(pairs_file), "--retrieval", str(answers)]
    bundle = Bundle.open(bundle_dir)
    texts = ["A run", "A second run", "An out", "A base", "The game"]
    setup = load_setups(bundle)["feature-extraction"]
    folders = [checkpoint_dir, bundle_dir]
    if form is not None:
        setup = replace(setup, sentence_vectors=form)
        folders = [Path(shutil.copytree(checkpoint_dir, tmp_path / "checkpoint"))]
        write_sentence_vectors(form, folders[0], hidden_size=setup.hidden_size)
    vectors = Embedder(runner=Engine.open(bundle), setup=setup)(texts)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    cosines = [vectors[a] @ vectors[b] for a, b in ((0, 1), (0, 2), (3, 4))]
    expected = pearsonr(cosines, [0.9, 0.1, 0.4]).statistic
    for folder in folders:
        command = [str(folder), *arguments, "--output", str(output)]
        assert main(command) == 0
        figures = json.loads(output.read_text())
        assert figures["embeddings_pearson"] == pytest.approx(expected, abs=1e-3)
        assert figures["embeddings_candidates"] == 2


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("query,answer\na,b\n", [], "has pairs, not scored pairs"),
        ("sentence1,sentence2,score\n,b,1\n", [], "no text in column sentence1"),
        (
            f"sentence1,sentence2,score\n{'run ' * 3000},b,1\n",
            ["--no-truncation"],
            "--truncation truncates it",
        ),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    checkpoint_dir: Path,
    tmp_path: Path,
    capsys: Capture,
    content: str,
    options: list[str],
    message: str,
) -> None:
    file, output = tmp_path / "pairs.csv", tmp_path / "figures.json"
    file.write_text(content)
    command = [str(checkpoint_dir), "--similarity", str(file), "--output", str(output)]
    assert main([*command, *options]) == 1
    assert message in capsys.readouterr().err
    assert not output.exists()
