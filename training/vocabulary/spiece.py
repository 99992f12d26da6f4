"""The tokenizer of a SentencePiece model, with the same ids as SentencePiece."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from albert_serve.tokenizer import SPECIAL_NAMES
from training.vocabulary.normalization import Folding
from training.vocabulary.settings import VocabError, VocabularySettings

_CLASSES: Final = (None, "AlbertTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
# Values of SentencePiece's enumerations of model types and piece types.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# SentencePiece replaces a user-defined symbol's score by this one, so that no other pieces win.
# Symbols of one character can keep their own score, because no piece competes with them.
_SYMBOL_SCORE: Final = -0.1
# Maximum number of letters to compose separately, because each needs a pass through the text.
_MAX_COMPOSED: Final = 64
# Code points of letters with two marks, and of the final letters of Hangul syllables.
_COMPOSED: Final = range(0xC0, 0x2000)
_FINALS: Final = "\u11a8-\u11c2"
# A character that no text contains. It prevents the composition of its two neighbours.
_BOUNDARY: Final = "\U0010ffff"
_NORMALIZATIONS: Final = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")


def build_tokenizer(spiece: Path, settings: VocabularySettings | None = None) -> Tokenizer:
    """Build a tokenizer with the same ids as SentencePiece for text that `Folding` normalises.

    `transformers` reads the `tokenizer.json` unchanged as a `PreTrainedTokenizerFast`. From
    `spiece.model` alone, transformers 5.23 builds another tokenizer: it adds the user-defined
    symbols as tokens, so a word after one of ( ) " - . gets a "▁" that was not there in training.

    Args:
        spiece: SentencePiece model.
        settings: settings in `tokenizer_config.json`. If they do not set case or accents, the
            pieces show whether the model distinguishes them.
    """
    settings = settings or VocabularySettings()
    proto = _read(spiece)
    for reason in _unsupported(proto, settings):
        raise VocabError(
            f"{spiece} cannot be read with the ids of SentencePiece: {reason}. Add the "
            "tokenizer.json that save_pretrained of transformers writes."
        )
    special = _special_pieces(proto, spiece, settings)
    normal = [piece.piece for piece in proto.pieces if piece.type == _NORMAL]
    is_unigram = proto.trainer_spec.model_type == _UNIGRAM
    tokenizer = Tokenizer(_unigram(proto) if is_unigram else _bpe(proto, special["unk"]))
    tokenizer.normalizer = normalizers.Sequence(
        [_folding(normal, settings).normalizer(), *_normalizers(proto, normal)]
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(normal)
    metaspace = decoders.Metaspace(prepend_scheme="always")
    tokenizer.decoder = (
        decoders.Sequence([decoders.ByteFallback(), metaspace])
        if proto.trainer_spec.byte_fallback
        else metaspace
    )
    cls, sep = special["cls"], special["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (cls, sep)],
    )
    names = [piece.piece for piece in proto.pieces if piece.type in (_CONTROL, _UNKNOWN)]
    names = list(dict.fromkeys([*names, *special.values()]))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return tokenizer


def _read(spiece: Path) -> Any:
    # Protobuf creates the class when it is imported, so type checkers cannot find the class.
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(spiece.read_bytes())
    except (OSError, DecodeError) as error:
        raise VocabError(f"{spiece} cannot be read as a SentencePiece model: {error}.") from error
    return proto


def _unsupported(proto: Any, settings: VocabularySettings) -> Iterator[str]:
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if settings.tokenizer_class not in _CLASSES:
        yield f"tokenizer_class {settings.tokenizer_class} numbers pieces differently"
    if trainer.model_type not in (_UNIGRAM, _BPE):
        yield "its model_type is neither unigram nor bpe"
    if trainer.treat_whitespace_as_suffix:
        yield "treat_whitespace_as_suffix puts the space after a word"
    if not normalizer.add_dummy_prefix or not normalizer.escape_whitespaces:
        yield "add_dummy_prefix or escape_whitespaces is off"
    if normalizer.precompiled_charsmap and normalizer.name not in _NORMALIZATIONS:
        yield f"its normalisation {normalizer.name!r} is not built into SentencePiece"
    if any(piece.type == _UNUSED for piece in proto.pieces):
        yield "it has pieces of type unused"
    if trainer.model_type == _BPE and any(map(_is_long_symbol, proto.pieces)):
        yield "it is a bpe model with user-defined symbols of several characters"


def _is_long_symbol(piece: Any) -> bool:
    return piece.type == _USER_DEFINED and len(piece.piece) > 1


def _special_pieces(proto: Any, spiece: Path, settings: VocabularySettings) -> dict[str, str]:
    """Return the name of the special piece for each role. Only padding may be missing."""
    pieces = {piece.piece for piece in proto.pieces}
    special: dict[str, str] = {}
    unknown = [piece.piece for piece in proto.pieces if piece.type == _UNKNOWN]
    for role, usual in SPECIAL_NAMES.items():
        names = [settings.special[role]] if role in settings.special else list(usual)
        name = next(
            (name for name in (unknown if role == "unk" else names) if name in pieces), None
        )
        if name is None and role != "pad":
            raise VocabError(
                f"{spiece} has no piece {' or '.join(names)} ({role}_token), which ALBERT needs. "
                f"Set {role}_token in tokenizer_config.json if the piece has another name."
            )
        if name is not None:
            special[role] = name
    return special


def _folding(normal: Sequence[str], settings: VocabularySettings) -> Folding:
    folding = Folding.of_pieces(normal)
    if settings.do_lower_case is not None:
        folding = replace(folding, case=settings.do_lower_case)
    if settings.keep_accents is not None:
        folding = replace(folding, accents=not settings.keep_accents)
    return folding


def _unigram(proto: Any) -> models.Unigram:
    pieces = [
        (piece.piece, _SYMBOL_SCORE if _is_long_symbol(piece) else piece.score)
        for piece in proto.pieces
    ]
    unk = next(index for index, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN)
    return models.Unigram(pieces, unk, proto.trainer_spec.byte_fallback)


def _bpe(proto: Any, unk: str) -> models.BPE:
    """Return the BPE model that merges any two pieces that form a piece, in order of its score."""
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    normal = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=normal.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    fallback: bool = proto.trainer_spec.byte_fallback
    return models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=fallback)


def _normalizers(proto: Any, normal: Sequence[str]) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        steps = [normalizers.Precompiled(charsmap)]
        # The map composes only short sequences, and uses the first match instead of the longest.
        composing = _composing("".join(normal))
        steps = [*composing, *steps, *composing]
    if _has_inner_space(normal):
        steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    return steps


def _composing(letters: str) -> list[normalizers.Normalizer]:
    """Return the steps that compose the letters of the vocabulary's pieces.

    NFC also sorts marks, unlike SentencePiece. If marks of several classes can follow each other,
    as in Arabic, each letter is composed separately.
    """
    composed = {letter for letter in letters if unicodedata.normalize("NFD", letter) != letter}
    classes = {unicodedata.combining(letter) for letter in letters} - {0}
    if not composed or len(classes) < 2 or len(composed) > _MAX_COMPOSED:
        return _nfc() if composed else []
    parts = {letter: unicodedata.normalize("NFD", letter) for letter in sorted(composed)}
    longest_first = sorted(parts, key=lambda letter: -len(parts[letter]))
    return [normalizers.Replace(parts[letter], letter) for letter in longest_first]


def _nfc() -> list[normalizers.Normalizer]:
    """Return the steps of NFC, except that composed letters are not composed with another mark.

    NFC composes ü and an acute to ǘ. SentencePiece does so only for u followed by both marks.
    """
    pairs = (unicodedata.decomposition(chr(code)).split() for code in _COMPOSED)
    firsts = {chr(int(pair[0], 16)) for pair in pairs if len(pair) == 2 and pair[0].isalnum()}
    composed = "".join(sorted(c for c in firsts if unicodedata.normalize("NFD", c) != c))
    return [
        normalizers.Replace(Regex(f"(?<=[{composed}가-힣])(?=[\\p{{M}}{_FINALS}])"), _BOUNDARY),
        normalizers.NFC(),
        normalizers.Replace(_BOUNDARY, ""),
    ]


def _pre_tokenizer(normal: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    if _has_inner_space(normal):
        return pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )


def _has_inner_space(normal: Sequence[str]) -> bool:
    """Return whether a piece extends over several words."""
    return any("▁" in piece[1:] for piece in normal)
