"""Training of a SentencePiece vocabulary with the settings of ALBERT's original code.

See google-research/albert, README, "SentencePiece".
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import sentencepiece

from albert_serve.progress import progress
from albert_serve.tokenizer import SPECIAL_TOKENS
from training.data.corpus import split_sentences
from training.vocabulary.normalization import Folding
from training.vocabulary.settings import TooFewPiecesError, VocabError

VOCAB_SIZE: Final = 30000
NUM_SENTENCES: Final = 10_000_000
# The original code removes case and accents.
_ALBERT: Final = Folding()
_USER_SYMBOLS: Final = ("(", ")", '"', "-", ".", "–", "£", "€")
_TOO_FEW: Final = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


def train_vocab(
    documents: Iterable[str],
    output: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    num_sentences: int = NUM_SENTENCES,
    seed: int = 0,
    folding: Folding = _ALBERT,
) -> Path:
    """Train a unigram model on sentences of a corpus, and return the path of `spiece.model`.

    The same documents and `seed` give the same file.

    Args:
        output: folder to write.
        vocab_size: number of pieces.
        num_sentences: maximum number of sentences, drawn from all documents.
        folding: removal of case and accents (default: both, as in ALBERT).
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


def _draw(items: Iterable[str], size: int, rng: random.Random) -> list[str]:
    """Return a uniform sample of at most `size` items, in one pass (reservoir sampling).

    SentencePiece's own sample differs in every process, even with a seed.
    """
    sample: list[str] = []
    for index, item in enumerate(items):
        if index < size:
            sample.append(item)
        elif (replaced := rng.randrange(index + 1)) < size:
            sample[replaced] = item
    return sample


def _train_model(sentences: list[str], vocab_size: int) -> bytes:
    """Train a SentencePiece model and return its bytes. `sentences` is emptied to free memory."""
    if not sentences:
        raise VocabError("There is no sentence to train on. Add text, or increase --num-sentences.")
    # SentencePiece stores its output file's name in the model, so the output is a nameless buffer.
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
        # SentencePiece's source location and the name of its own option are of no use to users.
        reason = str(error).rpartition("] ")[2].partition(" Increase ")[0]
        message = (
            f"A vocabulary of {vocab_size} pieces is not possible for this corpus: {reason} "
            "Change --vocab-size, or add text."
        )
        if too_few := _TOO_FEW.search(reason):
            raise TooFewPiecesError(message, int(too_few[1])) from error
        raise VocabError(message) from error
    return model.getvalue()


def _drain(items: list[str]) -> Iterator[str]:
    items.reverse()
    while items:
        yield items.pop()
