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
# The names that the Hub allows, and no path that is absolute, or has "." or ".." as its first part.
_REPO_ID: Final = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubModel:
    """A model, or a data set, on the Hub.

    Attributes:
        repo_id: such as "albert/albert-base-v2".
        revision: a branch, tag or commit; None for the main branch.
        repo_type: the Hub's name of its kind.
    """

    repo_id: str
    revision: str | None = None
    repo_type: Literal["model", "dataset"] = "model"

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Parse `id` or `id@revision`; None if the text cannot be a model's id."""
        repo_id, _, revision = text.partition("@")
        if not _REPO_ID.fullmatch(repo_id):
            return None
        return cls(repo_id=repo_id, revision=revision or None)

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision}" if self.revision else self.repo_id


def download(model: HubModel, patterns: Sequence[str]) -> Path:
    """Download the files that match a pattern; return their folder, named after the commit.

    Files in the cache are not downloaded again. Without a connection, the cache answers.
    """
    if model.repo_id not in _announced:
        _announced.add(model.repo_id)
        sys.stderr.write(f"downloading {model} from the Hub\n")
    try:
        return _snapshot(model, patterns)
    except GatedRepoError as error:
        raise HubError(
            f"{model} is gated: accept its terms at {constants.ENDPOINT}/{_path(model)}, and set "
            "HF_TOKEN to a token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{model} is no folder here, and {constants.ENDPOINT} has no {model.repo_type} of that "
            "name; if it is private, set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"{model.repo_id} has no revision {model.revision}; it is a branch, a tag or a commit"
        ) from error
    except LocalEntryNotFoundError as error:
        reason = _no_answer(error.__cause__ or error)
        raise HubError(
            f"{model} is no folder here, and not, or not wholly, in the cache of the Hub "
            f"({constants.HF_HUB_CACHE}); {reason}"
        ) from error
    except Exception as error:  # also those of its HTTP library, which differs by version
        raise HubError(f"{model} cannot be downloaded: {_first_line(error)}") from error


def find_cached(model: HubModel, patterns: Sequence[str]) -> Path | None:
    """Return the folder of a commit in the cache, if it has a file of each pattern; asks no Hub."""
    try:
        folder = _snapshot(model, patterns, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return folder if all(any(folder.glob(each)) for each in patterns) else None


def check_reachable(model: HubModel, lacking: str) -> None:
    """Check that the Hub answers, so that what is lacking is not merely not in the cache.

    Args:
        lacking: what the model's folder in the cache lacks, for the error.
    """
    try:
        HfApi().repo_info(model.repo_id, revision=model.revision, repo_type=model.repo_type)
    except Exception as error:  # also those of its HTTP library, which differs by version
        raise HubError(
            f"{model} is not wholly in the cache of the Hub ({constants.HF_HUB_CACHE}), which "
            f"lacks {lacking}; {_no_answer(error)}"
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
        return "HF_HUB_OFFLINE forbids a download"
    return f"{constants.ENDPOINT} cannot be reached: {_first_line(error)}"


def _path(model: HubModel) -> str:
    return model.repo_id if model.repo_type == "model" else f"{model.repo_type}s/{model.repo_id}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
