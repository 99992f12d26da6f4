"""Download of models and data sets from the Hugging Face Hub, into its cache.

`huggingface_hub` reads the environment: `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from albert_serve.errors import HubError

# The repositories whose download this process has announced.
_announced: Final[set[str]] = set()
# This matches names that the Hub allows, but no absolute path or path that begins with a dot.
_REPO_ID: Final = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubModel:
    """A model or data set on the Hub.

    Attributes:
        repo_id: owner and name, such as "albert/albert-base-v2".
        revision: branch, tag or commit, or None for the main branch.
        repo_type: type of the repository.
    """

    repo_id: str
    revision: str | None = None
    repo_type: Literal["model", "dataset"] = "model"

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Parse `id` or `id@revision`, or return None if the text cannot be a model's id."""
        repo_id, _, revision = text.partition("@")
        if not _REPO_ID.fullmatch(repo_id):
            return None
        return cls(repo_id=repo_id, revision=revision or None)

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision}" if self.revision else self.repo_id


def download(model: HubModel, patterns: Sequence[str]) -> Path:
    """Download the files that match a pattern, and return their folder, named after the commit.

    Files in the cache are not downloaded again, and are used as they are without a connection.
    """
    if model.repo_id not in _announced:
        _announced.add(model.repo_id)
        sys.stderr.write(f"Looking for {model} on the Hugging Face Hub.\n")
    try:
        return _snapshot(model, patterns)
    except GatedRepoError as error:
        raise HubError(
            f"{model} is gated. Accept its terms at {constants.ENDPOINT}/{_path(model)}, and set "
            "HF_TOKEN to a token of that account."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{model} is not a local folder, and {constants.ENDPOINT} has no {model.repo_type} of "
            "this name. If it is private, set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"{model.repo_id} has no revision {model.revision}. Use a branch, tag or commit."
        ) from error
    except LocalEntryNotFoundError as error:
        reason = _no_answer(error.__cause__ or error)
        raise HubError(
            f"{model} is not a local folder, and the Hub cache ({constants.HF_HUB_CACHE}) does not "
            f"have all of its files. {reason}"
        ) from error
    except Exception as error:  # versions of huggingface_hub raise different HTTP libraries' errors
        raise HubError(f"{model} cannot be downloaded: {_first_line(error)}.") from error


def find_cached(model: HubModel, patterns: Sequence[str]) -> Path | None:
    """Return the folder of a commit in the cache, if it has a file for each pattern."""
    try:
        folder = _snapshot(model, patterns, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return folder if all(any(folder.glob(pattern)) for pattern in patterns) else None


def check_reachable(model: HubModel, missing_file: str) -> None:
    """Check that the Hub can be reached. If not, a file may be missing only in the cache.

    Args:
        model: model whose folder in the cache lacks a file.
        missing_file: name of the missing file, for the error.
    """
    try:
        HfApi().repo_info(model.repo_id, revision=model.revision, repo_type=model.repo_type)
    except Exception as error:  # versions of huggingface_hub raise different HTTP libraries' errors
        raise HubError(
            f"The Hub cache ({constants.HF_HUB_CACHE}) does not have {missing_file} of {model}. "
            f"{_no_answer(error)}"
        ) from error


def _snapshot(model: HubModel, patterns: Sequence[str], *, local_files_only: bool = False) -> Path:
    folder = snapshot_download(
        model.repo_id,
        repo_type=model.repo_type,
        revision=model.revision,
        allow_patterns=list(patterns),
        local_files_only=local_files_only,
    )
    return Path(folder)


def _no_answer(error: BaseException) -> str:
    if constants.HF_HUB_OFFLINE or isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids a download."
    return f"{constants.ENDPOINT} cannot be reached: {_first_line(error)}."


def _path(model: HubModel) -> str:
    return model.repo_id if model.repo_type == "model" else f"{model.repo_type}s/{model.repo_id}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].removesuffix(".") if text else type(error).__name__
