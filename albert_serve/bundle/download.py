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

    Files in the Hub's cache are not downloaded again, and are used as they are without a
    connection. The folder has the content of one commit and does not change.

    Args:
        snapshot: folder named after the commit, with the manifest and the configuration, if the
            model has them.
        cache: parent of the new folder. Its files are hard links into the Hub's cache if possible,
            else copies, because ONNX Runtime rejects symbolic links out of a bundle's folder.
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
            raise BundleMissingError(
                f"{model} lacks {name}, which its {MANIFEST_FILE} lists. Upload it."
            )
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
            f"{folder} cannot be written: {error}. Set ALBERT_SERVE_CACHE to a writable folder."
        ) from error
    return folder


def _no_bundle(model: HubModel, snapshot: Path) -> str:
    if not (snapshot / CONFIG_FILE).is_file():
        return f"{model} is not a bundle: it has no {MANIFEST_FILE}."
    return (
        f"{model} is a checkpoint, not a bundle. Export it with `albert-serve export`, or pass it "
        "to `albert-serve serve` or `score`."
    )


def _link_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the target is on another file system, or has no hard links
        shutil.copyfile(source, target)
