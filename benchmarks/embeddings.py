"""Quality of embeddings: sentence similarity, and retrieval.

Embeds texts with bundles, which the service's engine runs, and with sentence-transformers models.
All embeddings are normalised to length 1. Prints a table, and writes it to `tables.md` in the
output folder:

- STS-B, SICK: Spearman correlation between cosine similarities and annotated scores, times 100.
- SQuAD: percentage of questions that are nearer to their own paragraph than to any other.

The last row is word-level TF-IDF, fitted on the pairs or on the paragraphs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sklearn.feature_extraction.text import TfidfVectorizer

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import WEIGHTS_FILE, Bundle
from albert_serve.bundle.sentence_vectors import MODULES_FILE
from albert_serve.files import sha256_of
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions, num_usable_cpus
from albert_serve.tasks import load_setups
from albert_serve.terminal import make_parser
from benchmarks.harness.page import bullets, describe_machine, table
from benchmarks.harness.process import REPOSITORY, BenchmarkError
from training.errors import report_errors
from training.tasks.embeddings.files import SimilarTexts, read_similar
from training.tasks.embeddings.metrics import (
    Embed,
    Embedder,
    retrieval_metrics,
    similarity_metrics,
)
from training.tasks.question_answering.files import read_squad

_PEER_BATCH: Final = 64
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.embeddings --stsb stsb/sts-dev.tsv --sick sick/SICK_test_annotated.txt
  python -m benchmarks.embeddings bundles/vectors bundles/int8 --stsb stsb/sts-dev.tsv \\
      --sentence-transformers all-MiniLM-L6-v2
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """The texts to embed. A data set is empty if no file was given for it.

    Attributes:
        similarity: scored sentence pairs by data set name.
        retrieval: questions with their paragraphs.
    """

    similarity: dict[str, list[SimilarTexts]] = field(default_factory=dict)
    retrieval: Sequence[SimilarTexts] = ()

    def headings(self) -> Iterator[str]:
        """Yield the column headings."""
        yield ""
        yield from (f"{name}, {len(pairs):,}" for name, pairs in self.similarity.items())
        if self.retrieval:
            yield f"SQuAD, {len(self.retrieval):,}"


def _cells(open_for: Callable[[Sequence[str]], Embed], data: _Data) -> Iterator[str]:
    """Yield the cells of a model's row: the correlations and the recall.

    Args:
        open_for: function that returns the embedder. Its argument is the texts to fit TF-IDF to.
    """
    for pairs in data.similarity.values():
        embed = open_for([text for pair in pairs for text in pair.texts])
        yield f"{100 * similarity_metrics(pairs, embed)['embeddings_spearman']:.2f}"
    if data.retrieval:
        embed = open_for(list({pair.texts[1] for pair in data.retrieval}))
        yield f"{100 * retrieval_metrics(data.retrieval, embed)['embeddings_recall_at_1']:.2f}"


def open_model(folder: Path, num_threads: int) -> Embed:
    """Return the embedder of a bundle, which truncates texts that are too long."""
    bundle = Bundle.open(folder)
    engine = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=num_threads))
    return Embedder(runner=engine, setup=load_setups(bundle)[FEATURE_EXTRACTION])


def open_peer(folder: Path) -> Embed:
    """Return the embedder of a sentence-transformers model, as its `modules.json` defines it.

    Raises:
        BenchmarkError: the folder has no `modules.json`.
    """
    if not (folder / MODULES_FILE).is_file():
        raise BenchmarkError(
            f"{folder} is not a model of sentence-transformers: it has no {MODULES_FILE}."
        )
    model = SentenceTransformer(str(folder), device="cpu")
    return partial(
        model.encode, batch_size=_PEER_BATCH, normalize_embeddings=True, show_progress_bar=False
    )


def _same(embed: Embed, _: Sequence[str]) -> Embed:
    """Return the embedder itself, because a trained model is not fitted on the texts."""
    return embed


def _tf_idf(texts: Sequence[str]) -> Embed:
    words = TfidfVectorizer(dtype=np.float32).fit(texts)
    return lambda texts: words.transform(texts).toarray()


def _read(options: argparse.Namespace) -> _Data:
    similarity = {}
    if options.stsb is not None:
        similarity["STS-B"] = read_similar([options.stsb])
    if options.sick is not None:
        similarity["SICK"] = read_similar([options.sick], delimiter="\t")
    questions = read_squad([options.squad]) if options.squad is not None else ()
    retrieval = [
        SimilarTexts(texts=(item.question, item.context), score=None, location=item.location)
        for item in questions
    ]
    if not (similarity or retrieval):
        raise BenchmarkError("There is nothing to measure. Set --stsb, --sick or --squad.")
    return _Data(similarity=similarity, retrieval=retrieval)


def _run(options: argparse.Namespace) -> int:
    data = _read(options)
    torch.set_num_threads(options.threads)
    opened: list[tuple[Path, Callable[[], Embed]]] = [
        (folder, partial(open_model, folder, options.threads)) for folder in options.models
    ]
    opened += [(folder, partial(open_peer, folder)) for folder in options.sentence_transformers]
    rows = []
    for folder, open_one in opened:
        name = f"{folder.resolve().name} ({sha256_of(folder / WEIGHTS_FILE)[:8]})"
        rows.append([name, *_cells(partial(_same, open_one()), data)])
        print("  ".join(rows[-1]), file=sys.stderr)
    rows.append(["TF-IDF", *_cells(_tf_idf, data)])
    tables = f"{bullets(describe_machine(options.threads))}\n\n{table([*data.headings()], rows)}\n"
    print(tables)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "tables.md").write_text(tables, encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.embeddings", __doc__, _EXAMPLES)
    add = parser.add_argument
    shipped = REPOSITORY / "models" / "albert-small-en"
    add(
        "models",
        nargs="*",
        type=Path,
        default=[shipped],
        help="bundles (default: the default model)",
    )
    add(
        "--sentence-transformers",
        nargs="+",
        type=Path,
        default=[],
        help="folders of sentence-transformers models",
    )
    add("--stsb", type=Path, help="pairs with a score, such as sts-dev.tsv")
    add("--sick", type=Path, help="pairs with a score: SICK_test_annotated.txt")
    add("--squad", type=Path, help="questions with their paragraphs, such as dev-v1.1.json")
    add("--threads", type=int, default=num_usable_cpus(), help="threads (default: %(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("runs/bench-embeddings"),
        help="folder of the results (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
