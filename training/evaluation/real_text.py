"""Real text to evaluate models on, as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Final

import numpy as np

from albert_serve.progress import progress
from albert_serve.tokenizer import AlbertTokenizer
from training.data.corpus import find_files, read_documents, split_sentences
from training.data.labelled.columns import Columns
from training.data.shards import Shard
from training.errors import EvaluationError
from training.glue.tasks import GlueTask
from training.model.provenance import file_names

# The text is from Wikipedia, CC BY-SA 3.0; examples/README.md names the authors.
DEFAULT_TEXT: Final = Path(__file__).with_name("verification.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class RealData:
    """Files to evaluate a model on.

    Attributes:
        text: a corpus, as pretraining takes it.
        labelled: for text classification, as finetuning takes them.
        columns: of those.
        task: of GLUE, whose files those are; None for the user's own.
        questions: for question answering, in SQuAD's format.
        tagged: for token classification, as finetuning takes them.
        heads: by name, what `labelled`, `columns` and `task` are for classifiers beside the default
            one.
    """

    text: tuple[Path, ...]
    labelled: tuple[Path, ...] = ()
    columns: Columns = field(default_factory=Columns)
    task: GlueTask | None = None
    questions: tuple[Path, ...] = ()
    tagged: tuple[Path, ...] = ()
    heads: Mapping[str, RealData] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RealText:
    """Documents as paragraphs of sentences, and the names of their files."""

    documents: list[list[list[str]]]
    files: list[str]

    @property
    def paragraphs(self) -> list[list[str]]:
        """The paragraphs of all documents."""
        return list(chain.from_iterable(self.documents))

    @property
    def sentences(self) -> list[str]:
        """The distinct sentences of all documents."""
        return list(dict.fromkeys(chain.from_iterable(self.paragraphs)))

    def tokenize(self, tokenizer: AlbertTokenizer) -> Shard:
        """Tokenise the documents as a part of a corpus; sentences without tokens are dropped."""
        counted = progress(self.documents, title="tokenising", unit="documents")
        documents = [
            [ids for each in chain.from_iterable(document) if (ids := _ids(tokenizer, each))]
            for document in counted
        ]
        documents = [sentences for sentences in documents if sentences]
        sentences = list(chain.from_iterable(documents))
        return Shard(
            tokens=np.array(list(chain.from_iterable(sentences)), np.int32),
            sentences=np.array([0, *accumulate(map(len, sentences))]),
            documents=np.array([0, *accumulate(map(len, documents))]),
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
        )


def _ids(tokenizer: AlbertTokenizer, sentence: str) -> list[int]:
    return tokenizer.encode_plain(sentence).ids


def read_real_text(paths: Sequence[Path], max_characters: int) -> RealText:
    """Read the first documents of the files, up to that number of characters in all.

    Raises:
        CorpusError: a file cannot be read.
        EvaluationError: there is no text in them.
    """
    files = find_files(paths) if paths else []
    texts: list[str] = []
    read_files: dict[Path, None] = {}
    left = max_characters
    for file in files:
        for text in read_documents([file]) if left > 0 else ():
            texts.append(text[:left])
            read_files[file] = None
            left -= len(text)
            if left <= 0:
                break
    if files and not any(text.strip() for text in texts):
        raise EvaluationError(f"no text in {', '.join(map(str, paths))}")
    counted = progress(texts, title="reading", unit="documents")
    return RealText(documents=[_paragraphs(text) for text in counted], files=file_names(read_files))


def _paragraphs(document: str) -> list[list[str]]:
    return [split for text in document.split("\n") if (split := split_sentences(text))]
