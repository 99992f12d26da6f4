"""Files in SQuAD's JSON format, written article by article."""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from albert_serve.files import partial_path, put_in_place
from training.data.corpus import CorpusError

_SUFFIXES: Final = (".json", ".xz")


def write_squad_file(
    output: Path, version: str, articles: Iterable[Mapping[str, Any]], *, if_none: str
) -> int:
    """Write the articles as they come, and put the file in place when it is complete.

    Args:
        output: a .json file, or .json.xz.
        if_none: what is wrong if there is no article.

    Returns:
        The number of questions.

    Raises:
        CorpusError: the file has another suffix or cannot be written, or there is no article.
    """
    if output.suffix not in _SUFFIXES:
        raise CorpusError(f"{output} is neither a .json file nor a .json.xz; name one of these")
    opener: Callable[..., IO[bytes]] = lzma.open if output.suffix == ".xz" else open
    partial = partial_path(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with io.TextIOWrapper(opener(partial, "wb"), encoding="utf-8") as stream:
            num_questions = _write(stream, version, articles)
        if not num_questions:
            raise CorpusError(if_none)
        put_in_place(partial, output)
    except OSError as error:
        raise CorpusError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return num_questions


def _write(stream: IO[str], version: str, articles: Iterable[Mapping[str, Any]]) -> int:
    num_questions = 0
    stream.write(f'{{"version": {json.dumps(version)}, "data": [')
    for article in articles:
        stream.write(",\n" if num_questions else "\n")
        stream.write(json.dumps(article, ensure_ascii=False))
        num_questions += sum(len(paragraph["qas"]) for paragraph in article["paragraphs"])
    stream.write("\n]}\n")
    return num_questions
