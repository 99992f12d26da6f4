"""Tokenisation of documents, in order, in one process or by a pool of workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.data.corpus import CorpusPosition, Document, split_sentences
from training.data.shards import ShardError

# Limits of a chunk, a worker's task: large enough to amortise its transfer, but small in memory.
_CHUNK_DOCUMENTS: Final = 256
_CHUNK_CHARACTERS: Final = 1 << 18
_BATCH_SENTENCES: Final = 1024
_CHUNKS_PER_WORKER: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenised:
    """A document's tokens.

    Attributes:
        tokens: (T,) int32 ids, without special tokens.
        lengths: (S,) int32 number of tokens in each sentence, at least 1.
        end: position in the corpus right after the document.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    end: CorpusPosition


def tokenise(
    documents: Iterable[Document], tokenizer_file: Path, *, num_workers: int
) -> Generator[list[Tokenised]]:
    """Tokenise documents in chunks, with the same result for any number of workers."""
    chunks = _chunks(documents)
    if num_workers == 1:
        return (_encode(tokenizer_file, chunk) for chunk in chunks)
    return _tokenise_in_parallel(chunks, tokenizer_file, num_workers)


def _tokenise_in_parallel(
    chunks: Iterable[list[Document]], tokenizer_file: Path, num_workers: int
) -> Generator[list[Tokenised]]:
    pool = ProcessPoolExecutor(
        num_workers,
        # Fork is unsafe, because the libraries run threads.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )
    # Ctrl-C interrupts the main thread, which would break a worker that is being started. So
    # another thread submits, which blocks the signal. Workers inherit its signal mask.
    submitter = ThreadPoolExecutor(
        1, initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, {signal.SIGINT})
    )
    pending: deque[Future[list[Tokenised]]] = deque()
    try:
        for chunk in chunks:
            pending.append(submitter.submit(_submit, pool, tokenizer_file, chunk).result())
            if len(pending) >= _CHUNKS_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ShardError(
            "A worker was killed, probably for lack of memory. Repeat the command with fewer "
            "--workers to resume."
        ) from error
    finally:
        submitter.shutdown()
        pool.shutdown(cancel_futures=True)


def _submit(
    pool: ProcessPoolExecutor, tokenizer_file: Path, chunk: list[Document]
) -> Future[list[Tokenised]]:
    try:
        return pool.submit(_encode, tokenizer_file, chunk)
    except OSError as error:  # A worker died while this thread started another worker.
        raise BrokenProcessPool(str(error)) from error


def _start_worker() -> None:
    """Limit a worker to one thread, and let it exit with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(tokenizer_file: Path, documents: list[Document]) -> list[Tokenised]:
    tokenizer = _load_tokenizer(tokenizer_file)
    sentences_of = [split_sentences(document.text) for document in documents]
    flat = list(chain.from_iterable(sentences_of))
    encodings = chain.from_iterable(
        tokenizer.encode_batch_fast(
            flat[begin : begin + _BATCH_SENTENCES], add_special_tokens=False
        )
        for begin in range(0, len(flat), _BATCH_SENTENCES)
    )
    tokenised = []
    for document, sentences in zip(documents, sentences_of, strict=True):
        encoded = islice(encodings, len(sentences))
        ids = [tokens for encoding in encoded if (tokens := encoding.ids)]
        tokenised.append(
            Tokenised(
                tokens=np.fromiter(chain.from_iterable(ids), np.int32),
                lengths=np.array([len(sentence) for sentence in ids], np.int32),
                end=document.end,
            )
        )
    return tokenised


@cache
def _load_tokenizer(file: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # As in SentencePiece, "[SEP]" in a text is five characters, not the end of a segment.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    num_characters = 0
    for document in documents:
        chunk.append(document)
        num_characters += len(document.text)
        if len(chunk) == _CHUNK_DOCUMENTS or num_characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk
