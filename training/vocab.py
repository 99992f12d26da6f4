"""Train a SentencePiece vocabulary with ALBERT's settings.

Writes `spiece.model` and `tokenizer.json`. Settings are those of the original code
(google-research/albert, README, "SentencePiece").
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from albert_serve.progress import progress
from albert_serve.tokenizer import SPECIAL_TOKENS
from training.data.corpus import find_files, read_documents, split_sentences
from training.errors import TrainingError, report_errors
from training.system.command_line import make_parser

_USER_SYMBOLS: Final = ("(", ")", '"', "-", ".", "–", "£", "€")
_EXAMPLES: Final = """examples:
  albert-serve vocab --corpus wiki/*.jsonl.xz --output vocab/
  albert-serve vocab --corpus letters.txt --vocab-size 8000 --output vocab/
"""


class VocabError(TrainingError):
    """A vocabulary that cannot be trained or read."""


def train_vocab(
    documents: Iterable[str],
    output: Path,
    *,
    vocab_size: int = 30000,
    num_sentences: int = 10_000_000,
    seed: int = 0,
) -> Path:
    """Train a unigram model on at most `num_sentences` sentences, drawn from the whole corpus.

    The same documents and `seed` give the same file. Returns the path of `spiece.model`.

    Raises:
        VocabError: the corpus has no sentence, or too little text for that many pieces.
    """
    normalizer = text_normalizer()
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


def build_tokenizer(spiece: Path) -> Tokenizer:
    """Build the tokenizer with the ids of SentencePiece itself on `text_normalizer`'s text.

    `transformers.AutoTokenizer` reads its `tokenizer.json` unchanged. From `spiece.model` alone,
    transformers 5.23 builds another tokenizer: it adds the user-defined symbols as tokens, so that
    a word after one of ( ) " - . gets a "▁" that the model was not trained with.

    Raises:
        VocabError: the file is no SentencePiece model, or its first five pieces are not ALBERT's.
    """
    # Protobuf makes the class at import, so that no type checker sees it.
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(spiece.read_bytes())
    except (OSError, DecodeError) as error:
        raise VocabError(f"{spiece} cannot be read as a SentencePiece model: {error}") from error
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    first = tuple(piece for piece, _ in pieces[: len(SPECIAL_TOKENS)])
    if first != SPECIAL_TOKENS:
        raise VocabError(f"{spiece} begins with {first}; ALBERT's begin with {SPECIAL_TOKENS}")
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=SPECIAL_TOKENS.index("<unk>")))
    tokenizer.normalizer = normalizers.Sequence(
        [text_normalizer(), normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in SPECIAL_TOKENS])
    return tokenizer


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
        raise VocabError(
            f"no vocabulary of {vocab_size} pieces from this corpus: {reason} "
            "Change --vocab-size, or give more text."
        ) from error
    return model.getvalue()


def _drain(items: list[str]) -> Iterator[str]:
    items.reverse()
    while items:
        yield items.pop()


def text_normalizer() -> normalizers.Normalizer:
    """Return a normalizer of quotes, accents and case, as in `AlbertTokenizer`."""
    return normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
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
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--vocab-size", type=int, default=30000, help="pieces (%(default)s)")
    parser.add_argument(
        "--num-sentences",
        type=int,
        default=10_000_000,
        help="maximum number of sentences to draw from the corpus (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of that draw (%(default)s)")
    options = parser.parse_args(arguments)
    return report_errors(
        lambda: _run(
            options.corpus,
            options.output,
            vocab_size=options.vocab_size,
            num_sentences=options.num_sentences,
            seed=options.seed,
        )
    )


def _run(
    corpus: Sequence[Path], output: Path, *, vocab_size: int, num_sentences: int, seed: int
) -> int:
    documents = read_documents(find_files(corpus))
    spiece = train_vocab(
        documents, output, vocab_size=vocab_size, num_sentences=num_sentences, seed=seed
    )
    build_tokenizer(spiece).save(str(output / "tokenizer.json"))
    print(f"{vocab_size} pieces in {spiece} and tokenizer.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
