"""Train a SentencePiece vocabulary with ALBERT's settings.

Writes `spiece.model` and `tokenizer.json`. The settings come from the original code
(google-research/albert, README, "SentencePiece").
"""

from __future__ import annotations

import string
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from albert_serve.files import write_atomically
from albert_serve.terminal import make_parser
from training.data.corpus import TEXT_COLUMN_HELP, find_files, read_documents
from training.errors import report_errors
from training.options.flags import Options, add_flags, flag, read_flags
from training.options.values import Count, Seed
from training.vocabulary.normalization import Folding
from training.vocabulary.settings import TooFewPiecesError, VocabularySettings
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.training import NUM_SENTENCES, VOCAB_SIZE, train_vocab

# Number of characters to scan for words that become equal, which takes a few seconds.
_SAMPLED_CHARACTERS: Final = 20_000_000
_EXAMPLES: Final = """examples:
  albert-serve vocab --corpus wiki/*.jsonl.xz --output vocab/
  albert-serve vocab --corpus letters.txt --vocab-size 8000 --output vocab/
  albert-serve vocab --corpus briefe.txt --cased --keep-accents --output vocab/
"""


@dataclass(frozen=True, kw_only=True)
class VocabConfig(Options, title="corpus and vocabulary"):
    """A corpus, and the vocabulary to make of it."""

    corpus: tuple[Path, ...] = flag(
        "text, JSON, CSV or Parquet files, plain, .gz, .xz, .bz2 or .zst, or folders", MISSING
    )
    text_column: str | None = flag(TEXT_COLUMN_HELP, metavar="NAME")
    output: Path = flag("folder to write", MISSING)
    vocab_size: Count = flag("number of pieces in the vocabulary", VOCAB_SIZE)
    num_sentences: Seed = flag("maximum number of sentences drawn from the corpus", NUM_SENTENCES)
    cased: bool = flag("keep capitals (default: lower-case all text)", default=False)
    keep_accents: bool = flag(
        "keep accents and other combining signs, as most languages except English need "
        "(default: remove them)",
        default=False,
    )
    seed: Seed = flag("seed of the draw of sentences", 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = make_parser("albert-serve vocab", __doc__, _EXAMPLES)
    add_flags(parser, VocabConfig)
    values = parser.parse_args(arguments)
    return report_errors(lambda: _run(read_flags(VocabConfig, values)))


def _run(config: VocabConfig) -> int:
    files, column = find_files(config.corpus), config.text_column
    vocab_size = config.vocab_size
    folding = Folding(case=not config.cased, accents=not config.keep_accents)
    _print_equal_words(read_documents(files, column), folding)
    train = partial(
        train_vocab,
        output=config.output,
        num_sentences=config.num_sentences,
        seed=config.seed,
        folding=folding,
    )
    try:
        spiece = train(read_documents(files, column), vocab_size=vocab_size)
    except TooFewPiecesError as error:
        print(
            f"{vocab_size} pieces are too few for the characters of the text. The vocabulary gets "
            f"{error.required} pieces.",
            file=sys.stderr,
        )
        vocab_size = error.required
        spiece = train(read_documents(files, column), vocab_size=vocab_size)
    settings = VocabularySettings(do_lower_case=folding.case, keep_accents=not folding.accents)
    content = build_tokenizer(spiece, settings).to_str(pretty=True)
    write_atomically(config.output / "tokenizer.json", content.encode())
    print(f"{vocab_size} pieces in {spiece} and tokenizer.json.")
    return 0


def _print_equal_words(documents: Iterable[str], folding: Folding) -> None:
    """Print how many words of the first documents the vocabulary cannot distinguish."""
    options = {"--cased": folding.case, "--keep-accents": folding.accents}
    if not any(options.values()):
        return
    words: dict[str, None] = {}
    num_characters = 0
    for document in documents:
        stripped = (word.strip(string.punctuation) for word in document.split())
        words.update(dict.fromkeys(filter(None, stripped)))
        num_characters += len(document)
        if num_characters > _SAMPLED_CHARACTERS:
            break
    groups = folding.group(words)
    if not groups:
        return
    # Words that differ only in capitals come last, as every sentence begins with one.
    groups.sort(key=lambda group: len({word.lower() for word in group}) == 1)
    examples = ", ".join(" = ".join(group) for group in groups[:3])
    folded = " and ".join(option for option, is_folded in options.items() if is_folded)
    print(
        f"{sum(map(len, groups))} of {len(words)} distinct words become equal to another "
        f"without {folded}, such as {examples}.",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
