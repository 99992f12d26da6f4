"""Bundles on the Hugging Face Hub, as folders that the service opens."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

from filelock import FileLock

from albert_serve.bundle.checkpoint import CONFIG_FILE
from albert_serve.bundle.manifest import CARD_FILE, MANIFEST_FILE, read_manifest
from albert_serve.errors import BundleMissingError, ConfigError
from albert_serve.files import replace_folder
from albert_serve.hub import HubModel, check_reachable, download


def download_bundle(model: HubModel, snapshot: Path, cache: Path) -> Path:
    """Download a bundle with its model card, and return its folder, which has the model's name.

    Files in the cache of the Hub are not downloaded again. Without a connection, that cache
    answers. The folder's content is that of one commit and does not change.

    Args:
        snapshot: has the manifest and the configuration, if the model has them; named after the
            commit.
        cache: holds the folder; its files are hard links into the cache of the Hub where that is
            possible, else copies. ONNX Runtime refuses symbolic links out of a bundle's folder.
    """
    if not (snapshot / MANIFEST_FILE).is_file():
        check_reachable(model, MANIFEST_FILE)
        raise BundleMissingError(_no_bundle(model, snapshot))
    names = (MANIFEST_FILE, *read_manifest(snapshot).files)
    pinned = HubModel(repo_id=model.repo_id, revision=snapshot.name)
    snapshot = download(pinned, [glob.escape(name) for name in (*names, CARD_FILE)])
    for name in names:
        if not (snapshot / name).is_file():
            check_reachable(pinned, name)
            raise BundleMissingError(f"{model} lacks {name}, which its {MANIFEST_FILE} lists")
    if (snapshot / CARD_FILE).is_file():
        names = (*names, CARD_FILE)
    folder = cache / snapshot.name / model.repo_id.rpartition("/")[2]
    try:
        with FileLock(cache / ".lock"):
            if not folder.is_dir():
                folder.parent.mkdir(mode=0o755, exist_ok=True)
                with replace_folder(folder) as partial:
                    for name in names:
                        _link_file((snapshot / name).resolve(), partial / name)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error}; set ALBERT_SERVE_CACHE to a folder that can"
        ) from error
    return folder


def _no_bundle(model: HubModel, snapshot: Path) -> str:
    if not (snapshot / CONFIG_FILE).is_file():
        return f"{model} is not a bundle: it has no {MANIFEST_FILE}"
    return (
        f"{model} is a checkpoint, not a bundle: it has no {MANIFEST_FILE}. `albert-serve serve` "
        "and `score` take it; here, give a bundle that `albert-serve export` wrote"
    )


def _link_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
