"""Train a SentencePiece vocabulary with ALBERT's settings.

Writes `spiece.model` and `tokenizer.json`. Settings are those of the original code
(google-research/albert, README, "SentencePiece").
"""

from __future__ import annotations

import argparse
import io
import random
import re
import string
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import sentencepiece

from albert_serve.progress import progress
from albert_serve.tokenizer import SPECIAL_TOKENS
from training.data.corpus import (
    TEXT_COLUMN_HELP,
    find_files,
    read_documents,
    split_sentences,
)
from training.errors import report_errors
from training.system.command_line import make_parser
from training.vocabulary.errors import TooFewPiecesError, VocabError
from training.vocabulary.normalization import Folding
from training.vocabulary.settings import VocabularySettings
from training.vocabulary.spiece import build_tokenizer

# Among which words are counted that become equal; a few seconds.
_SAMPLED_CHARACTERS: Final = 20_000_000
# As the original code reads text.
_ALBERT: Final = Folding()
_USER_SYMBOLS: Final = ("(", ")", '"', "-", ".", "–", "£", "€")
_TOO_FEW: Final = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_EXAMPLES: Final = """examples:
  albert-serve vocab --corpus wiki/*.jsonl.xz --output vocab/
  albert-serve vocab --corpus letters.txt --vocab-size 8000 --output vocab/
  albert-serve vocab --corpus briefe.txt --cased --keep-accents --output vocab/
"""


def train_vocab(
    documents: Iterable[str],
    output: Path,
    *,
    vocab_size: int = 30000,
    num_sentences: int = 10_000_000,
    seed: int = 0,
    folding: Folding = _ALBERT,
) -> Path:
    """Train a unigram model on at most `num_sentences` sentences, drawn from the whole corpus.

    The same documents and `seed` give the same file. Returns the path of `spiece.model`.

    Args:
        folding: whether text loses its case and its accents before it is read, as ALBERT's does.

    Raises:
        VocabError: the corpus has no sentence, or too little text for that many pieces.
    """
    normalizer = folding.normalizer()
    sentences = (
        normalizer.normalize_str(sentence)
        for document in documents
        for sentence in split_sentences(document)
    )
    counted = progress(sentences, title="reading", unit="sentences", is_step=False)
    rng = random.Random(seed)
    model = _train_model(_draw(counted, num_sentences, rng), vocab_size)
    output.mkdir(parents=True, exist_ok=True)
    spiece = output / "spiece.model"
    spiece.write_bytes(model)
    return spiece


def _draw(items: Iterable[str], num_kept: int, rng: random.Random) -> list[str]:
    """Draw `num_kept` items uniformly in one pass (reservoir sampling).

    Not left to SentencePiece, whose sample differs in every process, whatever its seed.
    """
    kept: list[str] = []
    for index, item in enumerate(items):
        if index < num_kept:
            kept.append(item)
        elif (place := rng.randrange(index + 1)) < num_kept:
            kept[place] = item
    return kept


def _train_model(sentences: list[str], vocab_size: int) -> bytes:
    """Train a SentencePiece model, return its bytes, and empty `sentences` to free memory."""
    if not sentences:
        raise VocabError("no sentence to train on; is the corpus empty, or --num-sentences 0?")
    # A writer, since a file name would be stored in the model.
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_drain(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            control_symbols=list(SPECIAL_TOKENS[2:]),
            user_defined_symbols=list(_USER_SYMBOLS),
            normalization_rule_name="nmt_nfkc",
            character_coverage=0.99995,
            minloglevel=1,
        )
    except RuntimeError as error:
        # Without SentencePiece's source location before, and its own option's name after.
        reason = str(error).rpartition("] ")[2].partition(" Increase ")[0]
        message = (
            f"no vocabulary of {vocab_size} pieces from this corpus: {reason} "
            "Change --vocab-size, or give more text."
        )
        if too_few := _TOO_FEW.search(reason):
            raise TooFewPiecesError(message, int(too_few[1])) from error
        raise VocabError(message) from error
    return model.getvalue()


def _drain(items: list[str]) -> Iterator[str]:
    items.reverse()
    while items:
        yield items.pop()


def _tell_equal_words(documents: Iterable[str], folding: Folding) -> None:
    """Say how many words of the first documents the vocabulary cannot tell apart."""
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
    # Those first that differ in more than capitals, as at the beginning of a sentence.
    groups.sort(key=lambda group: len({word.lower() for word in group}) == 1)
    examples = ", ".join(" = ".join(group) for group in groups[:3])
    folded = " and ".join(option for option, is_folded in options.items() if is_folded)
    print(
        f"{sum(map(len, groups))} of {len(words)} distinct words become equal to another without "
        f"{folded}, such as {examples}",
        file=sys.stderr,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("albert-serve vocab", __doc__, _EXAMPLES)
    parser.add_argument(
        "--corpus",
        nargs="+",
        type=Path,
        required=True,
        help="text or JSONL files, plain, .gz, .xz, .bz2 or .zst, or folders of them",
    )
    parser.add_argument("--text-column", metavar="NAME", help=TEXT_COLUMN_HELP)
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--vocab-size", type=int, default=30000, help="pieces (%(default)s)")
    parser.add_argument(
        "--num-sentences",
        type=int,
        default=10_000_000,
        help="maximum number of sentences to draw from the corpus (%(default)s)",
    )
    parser.add_argument(
        "--cased", action="store_true", help="keep capitals; without it all text is lower-cased"
    )
    parser.add_argument(
        "--keep-accents",
        action="store_true",
        help="keep accents and other combining signs, which most languages but English need",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of that draw (%(default)s)")
    options = parser.parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    files, column = find_files(options.corpus), options.text_column
    vocab_size: int = options.vocab_size
    folding = Folding(case=not options.cased, accents=not options.keep_accents)
    _tell_equal_words(read_documents(files, column), folding)
    train = partial(
        train_vocab,
        output=options.output,
        num_sentences=options.num_sentences,
        seed=options.seed,
        folding=folding,
    )
    try:
        spiece = train(read_documents(files, column), vocab_size=vocab_size)
    except TooFewPiecesError as error:
        print(
            f"{vocab_size} pieces are too few for the characters of the text; the vocabulary has "
            f"the {error.required} that it needs",
            file=sys.stderr,
        )
        vocab_size = error.required
        spiece = train(read_documents(files, column), vocab_size=vocab_size)
    settings = VocabularySettings(do_lower_case=folding.case, keep_accents=not folding.accents)
    build_tokenizer(spiece, settings).save(str(options.output / "tokenizer.json"))
    print(f"{vocab_size} pieces in {spiece} and tokenizer.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
