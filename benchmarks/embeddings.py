"""Embeddings of models: similarity of sentences, retrieval, and a classifier of intents over them.

Embeds texts with bundles (by the engine of the service), checkpoints and models of
sentence-transformers, each pooled as it says (else the mean of all tokens), all of length 1, and
prints a table:

- STS-B, SICK: Spearman's correlation of cosine similarities with the scores, times 100.
- SQuAD: percentage of questions whose own paragraph is the nearest of all paragraphs.
- Banking77, MTEB: accuracy of MTEB's Banking77Classification, the mean over ten logistic
  regressions on 8 texts of each intent, C = 1. MTEB takes all 3,080 texts of the test set; the
  table says how many there are here.
- Banking77, 8 and 16 each: the same with the C that is best on the training texts of the first of
  the ten (three-fold cross-validation).
- Banking77, all: accuracy of one logistic regression on all training texts, C = 10.
- vectors/s: over the texts of Banking77, tokenisation included.

The last row has TF-IDF of words in place of embeddings, fitted on the pairs, the paragraphs or the
training texts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import MANIFEST_FILE, WEIGHTS_FILE, Bundle
from albert_serve.bundle.sentence_vectors import MODULES_FILE, read_sentence_vectors
from albert_serve.files import sha256_of
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions, num_usable_cpus
from albert_serve.tasks.load import load_setups
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.page import table
from benchmarks.harness.process import REPOSITORY, BenchmarkError
from training.conversion.source import open_checkpoint
from training.data.labelled.texts import LabelledText, read_splits
from training.data.questions import read_squad
from training.data.similar import SimilarTexts, read_similar
from training.errors import report_errors
from training.evaluation.embeddings import (
    Embed,
    Embedder,
    retrieval_figures,
    similarity_figures,
    torch_embedder,
)
from training.model.checkpoint import load_checkpoint
from training.system.command_line import make_parser

# Settings of MTEB's AbsTaskClassification, whose classifier is scikit-learn's default (lbfgs).
_SEED: Final = 42
_NUM_EXPERIMENTS: Final = 10
_MTEB_TEXTS: Final = 8
_MTEB_ITERATIONS: Final = 100
_TEXTS_A_LABEL: Final = (8, 16)
# 100 are too few to converge.
_MAX_ITERATIONS: Final = 1000
_INVERSE_PENALTIES: Final = (1.0, 10.0, 100.0)
# With all texts, better than scikit-learn's default for each row of the table (three-fold
# cross-validation on the training texts).
INVERSE_PENALTY_OF_ALL: Final = 10.0
_PEER_BATCH: Final = 64
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.embeddings --stsb stsb/sts-dev.tsv --sick sick/SICK_test_annotated.txt \\
      --banking77 banking77/train.csv banking77/test.csv
  python -m benchmarks.embeddings runs/vectors/best bundles/int8 --stsb stsb/sts-dev.tsv \\
      --sentence-transformers all-MiniLM-L6-v2
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The texts of the table. A data set that was not given is empty.

    Attributes:
        retrieval: questions with their paragraphs.
    """

    similarity: dict[str, list[SimilarTexts]] = field(default_factory=dict)
    retrieval: Sequence[SimilarTexts] = ()
    train: Sequence[LabelledText] = ()
    test: Sequence[LabelledText] = ()


def measure(embed: Embed, data: Data) -> Iterator[str]:
    """Yield the cells of a model's row."""
    yield from _similarities(lambda _: embed, data)
    if data.train:
        texts = [text.text for text in (*data.train, *data.test)]
        began_s = time.perf_counter()
        vectors = embed(texts)
        duration_s = time.perf_counter() - began_s
        yield from _accuracies(vectors, data)
        yield f"{len(texts) / duration_s:.0f}"


def _similarities(open_for: Callable[[Sequence[str]], Embed], data: Data) -> Iterator[str]:
    """Yield the correlations and the recall.

    Args:
        open_for: returns the embeddings, for the texts that a vocabulary may be fitted on.
    """
    for pairs in data.similarity.values():
        embed = open_for([text for pair in pairs for text in pair.texts])
        yield f"{100 * similarity_figures(pairs, embed)['embeddings_spearman']:.2f}"
    if data.retrieval:
        embed = open_for(list({pair.texts[1] for pair in data.retrieval}))
        yield f"{100 * retrieval_figures(data.retrieval, embed)['embeddings_recall_at_1']:.2f}"


def _accuracies(vectors: Any, data: Data) -> Iterator[str]:
    """Yield the accuracies on few and on all training texts, in percent.

    Args:
        vectors: (N, H) of the training texts and then those of the test, dense or sparse.
    """
    train, test = vectors[: len(data.train)], vectors[len(data.train) :]
    labels, targets = (
        np.array([text.label for text in texts]) for texts in (data.train, data.test)
    )

    def accuracy(classifier: LogisticRegression, samples: Iterable[Any]) -> str:
        scores = [
            classifier.fit(train[chosen], labels[chosen]).score(test, targets) for chosen in samples
        ]
        return f"{100 * np.mean(scores):.2f}"

    mteb = LogisticRegression(random_state=_SEED, max_iter=_MTEB_ITERATIONS)
    yield accuracy(mteb, undersampled(labels.tolist(), _MTEB_TEXTS, _NUM_EXPERIMENTS))
    for num_each in _TEXTS_A_LABEL:
        samples = list(undersampled(labels.tolist(), num_each, _NUM_EXPERIMENTS))
        penalty = _best_penalty(train[samples[0]], labels[samples[0]])
        yield accuracy(LogisticRegression(C=penalty, max_iter=_MAX_ITERATIONS), samples)
    of_all = LogisticRegression(C=INVERSE_PENALTY_OF_ALL, max_iter=_MAX_ITERATIONS)
    yield accuracy(of_all, [np.arange(len(labels))])


def _best_penalty(vectors: Any, labels: NDArray[np.int64]) -> float:
    """Return the C that is best by cross-validation."""
    classifier = LogisticRegression(max_iter=_MAX_ITERATIONS)
    search = GridSearchCV(classifier, {"C": _INVERSE_PENALTIES}, cv=3)
    return float(search.fit(vectors, labels).best_params_["C"])


def undersampled(labels: Sequence[int], num_each: int, num_experiments: int) -> Iterator[list[int]]:
    """Yield the indices of `num_each` examples of each label, or as many as it has.

    As MTEB draws them: each experiment shuffles the order of the one before, by the same seed.
    """
    order = list(range(len(labels)))
    for _ in range(num_experiments):
        np.random.RandomState(_SEED).shuffle(order)
        counts: Counter[int] = Counter()
        chosen = []
        for index in order:
            if counts[labels[index]] < num_each:
                counts[labels[index]] += 1
                chosen.append(index)
        yield chosen


def open_model(folder: Path, num_threads: int) -> Embed:
    """Open a bundle, or a checkpoint in torch; texts that are too long are cut.

    Raises:
        BundleError, CheckpointError: it cannot be opened.
    """
    if (folder / MANIFEST_FILE).is_file():
        bundle = Bundle.open(folder)
        engine = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=num_threads))
        setup = load_setups(bundle)[FEATURE_EXTRACTION]
        return Embedder(runner=engine, setup=setup)
    with open_checkpoint(folder) as checkpoint:
        model = load_checkpoint(checkpoint.folder)
        tokenizer = AlbertTokenizer.from_file(checkpoint.folder / "tokenizer.json")
        form = read_sentence_vectors(checkpoint.folder)
        return torch_embedder(model, tokenizer, form)


def open_peer(folder: Path) -> Embed:
    """Open a model of sentence-transformers, whose vectors are as its `modules.json` says.

    Raises:
        BenchmarkError: the folder has none.
    """
    if not (folder / MODULES_FILE).is_file():
        raise BenchmarkError(f"{folder} is not a model of sentence-transformers: no {MODULES_FILE}")
    model = SentenceTransformer(str(folder), device="cpu")
    return partial(
        model.encode, batch_size=_PEER_BATCH, normalize_embeddings=True, show_progress_bar=False
    )


def _tf_idf(data: Data) -> Iterator[str]:
    def embed_by(texts: Sequence[str]) -> Embed:
        words = TfidfVectorizer(dtype=np.float32).fit(texts)
        return lambda texts: words.transform(texts).toarray()

    yield from _similarities(embed_by, data)
    if data.train:
        words = TfidfVectorizer().fit([text.text for text in data.train])
        vectors = words.transform([text.text for text in (*data.train, *data.test)])
        yield from (*_accuracies(vectors, data), "")


def _read(options: argparse.Namespace) -> Data:
    similarity = {}
    if options.stsb is not None:
        similarity["STS-B"] = read_similar([options.stsb])
    if options.sick is not None:
        similarity["SICK"] = read_similar([options.sick], delimiter="\t")
    retrieval = [
        SimilarTexts(texts=(item.question, item.context), score=None, place=item.place)
        for item in (read_squad([options.squad]) if options.squad is not None else ())
    ]
    if options.banking77 is None:
        return Data(similarity=similarity, retrieval=retrieval)
    train, test = options.banking77
    texts = read_splits({"train": [train], "test": [test]}).texts
    return Data(
        similarity=similarity, retrieval=retrieval, train=texts["train"], test=texts["test"]
    )


def _run(options: argparse.Namespace) -> int:
    data = _read(options)
    if not (data.similarity or data.retrieval or data.train):
        raise BenchmarkError("nothing to measure: give --stsb, --sick, --squad or --banking77")
    torch.set_num_threads(options.threads)
    opened: list[tuple[Path, Callable[[], Embed]]] = [
        (folder, partial(open_model, folder, options.threads)) for folder in options.models
    ]
    opened += [(folder, partial(open_peer, folder)) for folder in options.sentence_transformers]
    rows = []
    for folder, open_one in opened:
        name = f"{folder.resolve().name} ({sha256_of(folder / WEIGHTS_FILE)[:8]})"
        rows.append([name, *measure(open_one(), data)])
        print("  ".join(rows[-1]), file=sys.stderr)
    rows.append(["TF-IDF", *_tf_idf(data)])
    print(table(_headings(data), rows))
    return 0


def _headings(data: Data) -> list[str]:
    headings = ["", *(f"{name}, {len(pairs):,}" for name, pairs in data.similarity.items())]
    if data.retrieval:
        headings.append(f"SQuAD, {len(data.retrieval):,}")
    if data.train:
        sizes = ["MTEB", *(f"{num_each} each" for num_each in _TEXTS_A_LABEL), "all"]
        headings += [*(f"Banking77, {size}, {len(data.test):,}" for size in sizes), "vectors/s"]
    return headings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.embeddings", __doc__, _EXAMPLES)
    add = parser.add_argument
    shipped = REPOSITORY / "models" / "albert-small-en"
    add("models", nargs="*", type=Path, default=[shipped], help="bundles or checkpoints")
    add("--sentence-transformers", nargs="+", type=Path, default=[], help="models, as folders")
    add("--stsb", type=Path, help="pairs with a score, such as sts-dev.tsv")
    add("--sick", type=Path, help="SICK_test_annotated.txt")
    add("--squad", type=Path, help="questions with their paragraphs, such as dev-v1.1.json")
    add("--banking77", type=Path, nargs=2, metavar=("TRAIN", "TEST"), help="train.csv and test.csv")
    add("--threads", type=int, default=num_usable_cpus(), help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
