"""A tokenised corpus is opened whole, checked, and without what made it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.training.support import make_shards
from training.data.preparation import prepare
from training.data.shards import Shard, ShardError, Shards


@pytest.fixture
def folder(tokenizer_file: Path, tmp_path: Path) -> Path:
    """Two parts: of five sentences in two documents, and of one."""
    file = tmp_path / "corpus.txt"
    file.write_text("One. Two. Three.\n\nFour. Five.\n\n" + "And a long one, " * 100)
    prepare([file], tokenizer_file, tmp_path / "shards", part_bytes=700)
    return tmp_path / "shards"


def shards_of(*tokens: list[int]) -> Shards:
    return make_shards(
        *(
            Shard(
                tokens=np.array(part, np.uint16),
                sentences=np.array([0, len(part)]),
                documents=np.array([0, 1]),
            )
            for part in tokens
        )
    )


def test_sizes_are_those_of_all_parts(folder: Path) -> None:
    shards = Shards.open(folder)
    note = json.loads((folder / "shards.json").read_text())
    assert [part.num_documents for part in shards.parts] == [2, 1]
    assert [part.num_sentences for part in shards.parts] == [5, 1]
    assert shards.num_tokens == sum(part["num_tokens"] for part in note["parts"])
    assert shards.fingerprint == note["fingerprint"]


@given(
    st.lists(
        npst.arrays(np.uint16, st.integers(1, 50), elements=st.integers(0, 30)),
        min_size=1,
        max_size=4,
    )
)
def test_token_counts_are_those_of_all_parts(tokens: list[Any]) -> None:
    counts = shards_of(*tokens).token_counts(40)
    together = np.concatenate(tokens).tolist()
    assert counts.tolist() == [together.count(token) for token in range(40)]


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    shards = shards_of([1, 2], [3, 10])
    assert shards.token_counts(11)[10] == 1
    with pytest.raises(ShardError, match="token id 10, the vocabulary 10 tokens; prepare it"):
        shards.token_counts(10)


def test_the_tokenizer_is_compared(folder: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    Shards.open(folder, copy)
    copy.write_bytes(tokenizer_file.read_bytes() + b"\n")
    with pytest.raises(ShardError, match=f"{folder} was prepared with another .* than {copy}"):
        Shards.open(folder, copy)
    with pytest.raises(ShardError, match=r"none.json cannot be read: No such file"):
        Shards.open(folder, tmp_path / "none.json")


def overwrite(name: str, values: Any) -> Callable[[Path], Any]:
    return lambda part: np.save(part / name, np.asarray(values))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda part: (part / "tokens.npy").unlink(),
    "truncated": lambda part: os.truncate(part / "tokens.npy", 140),
    "empty": lambda part: os.truncate(part / "sentences.npy", 0),
    "no array": lambda part: (part / "tokens.npy").write_bytes(b"text"),
    "no document": overwrite("documents.npy", np.zeros(0, np.int64)),
    "other documents": overwrite("documents.npy", [0, 1]),
    "other sentences": overwrite("sentences.npy", [0, 1, 2, 3]),
    "descending": overwrite("documents.npy", [0, 6, 5]),
    "no integers": overwrite("documents.npy", [0.0, 2.0, 5.0]),
    "no ids": overwrite("tokens.npy", ["text"]),
    "one document for two": overwrite("documents.npy", [0, 5]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_named(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder / "part-00000")
    with pytest.raises(ShardError, match=f"{folder}/part-00000.*; delete {folder} and prepare"):
        Shards.open(folder)


@pytest.mark.parametrize("change", [{"format": 3}, {"parts": None}, {"parts": [{}]}])
def test_a_list_that_cannot_be_is_refused(folder: Path, change: dict[str, Any]) -> None:
    file = folder / "shards.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ShardError, match=f"{file} is damaged, .*; delete {folder} and prepare"):
        Shards.open(folder)


def test_a_folder_without_a_corpus_says_how_to_make_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ShardError, match=r"shards.json; make it with albert-serve prepare"):
            Shards.open(folder)
