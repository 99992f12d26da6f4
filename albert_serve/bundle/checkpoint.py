"""A checkpoint in place of a bundle: it is exported into the cache, once."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from filelock import FileLock

from albert_serve import __version__
from albert_serve.bundle.manifest import MANIFEST_FILE, Bundle
from albert_serve.config import Precision
from albert_serve.errors import BundleError, ConfigError
from albert_serve.files import local_path, sha256_of
from albert_serve.settings import CACHE_VARIABLE, cache_folder, store_tag

CONFIG_FILE: Final = "config.json"
# A folder with one of these is a checkpoint: of a whole model, an adapter, or Google's format.
_CONFIG_FILES: Final = (CONFIG_FILE, "adapter_config.json", "albert_config.json")
_OPTION: Final = re.compile(r"(?<![\w/])--[a-z]")
# The second pattern matches the parts of a model of sentence-transformers, such as 1_Pooling.
_CHECKPOINT_FILES: Final = ("*", "[0-9]_*/*")


def find_bundle(
    reference: str | os.PathLike[str],
    precision: Precision | None = None,
    *,
    exports: bool = True,
) -> Path:
    """Return a bundle's folder or tag; first download a model of the Hub, and export a checkpoint.

    A process of its own exports; it needs the extra `train`. The cache keeps the bundle of a
    folder by the hash of its files, and of a model on the Hub by its commit.

    Args:
        reference: a folder, `bentoml:NAME[:VERSION]`, or a name on the Hub, OWNER/NAME[@REVISION].
        precision: of the export; None for fp32.
        exports: whether a checkpoint is allowed.
    """
    named = Path(reference)
    if store_tag(named) is not None:
        return _bundle(named, precision)
    folder = local_path(reference)
    if folder is None:
        return _find_on_hub(os.fspath(reference), precision, exports)
    if not exports or not _is_checkpoint(folder):
        return _bundle(folder, precision)
    folder = Path(os.path.abspath(folder))  # a link's name, not its target's
    return _export(str(folder), folder.name, [*_hashes(folder)], precision)


def _own_folder(name: str) -> Path:
    """Return a folder in the cache, which only this user can write to."""
    cache = cache_folder()
    if cache is None:
        raise ConfigError(f"there is no cache folder for downloads; set {CACHE_VARIABLE}")
    folder = cache / name
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error}; set {CACHE_VARIABLE} to a folder that can"
        ) from error
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ConfigError(
            f"other users can write to {folder}, and so could choose the model. Run `chmod go-w "
            f"{folder}` if it is yours, or set {CACHE_VARIABLE} to a folder of your own."
        )
    return folder


def _find_on_hub(reference: str, precision: Precision | None, exports: bool) -> Path:
    # Imported for a model on the Hub only: its client takes time to import.
    from albert_serve.bundle.download import download_bundle
    from albert_serve.hub import HubModel, download

    model = HubModel.parse(reference)
    if model is None:
        return _bundle(Path(reference), precision)
    snapshot = download(model, (MANIFEST_FILE, CONFIG_FILE))
    if not exports or not _is_checkpoint(snapshot):
        return _bundle(download_bundle(model, snapshot, _own_folder("hub")), precision)
    pinned = f"{model.repo_id}@{snapshot.name}"
    return _export(pinned, model.repo_id.rpartition("/")[2], [pinned], precision)


def _is_checkpoint(folder: Path) -> bool:
    is_bundle = (folder / MANIFEST_FILE).is_file()
    return not is_bundle and any((folder / name).is_file() for name in _CONFIG_FILES)


def _bundle(reference: Path, precision: Precision | None) -> Path:
    if precision is not None:
        raise ConfigError(
            f"{reference} is not a checkpoint; --precision is for the export of one, and a bundle "
            "keeps its precision"
        )
    return reference


def _hashes(checkpoint: Path) -> Iterator[str]:
    files = (file for pattern in _CHECKPOINT_FILES for file in checkpoint.glob(pattern))
    for file in sorted(file for file in files if file.is_file()):
        yield f"{file.relative_to(checkpoint)} {sha256_of(file)}"


def _export(checkpoint: str, name: str, content: list[str], precision: Precision | None) -> Path:
    """Export a checkpoint, unless the cache has a bundle of the same content and precision."""
    precision = precision or "fp32"
    lines = "\n".join([__version__, precision, *content])
    key = hashlib.sha256(lines.encode()).hexdigest()[:16]
    exports = _own_folder("exports")
    bundle = exports / key / name
    with FileLock(exports / ".lock"):
        if bundle.is_dir() and _is_valid(bundle):
            return bundle
        for leftover in exports.glob("*/.*"):  # of exports that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        bundle.parent.mkdir(mode=0o755, exist_ok=True)  # not for the group, as by some umasks
        sys.stderr.write(f"exporting {checkpoint} in {precision} into the cache, once\n")
        command = [sys.executable, "-m", "albert_serve", "export", checkpoint, str(bundle)]
        command += ["--precision", precision]
        if precision == "fp32":  # keeps the checkpoint's weights, so it costs nothing
            command.append("--no-quality")
        process = subprocess.run(  # noqa: S603  # our own program
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    if process.returncode:
        reason = _describe(process.stderr.decode(errors="replace"), checkpoint)
        raise BundleError(f"{checkpoint} cannot be exported in {precision}: {reason}")
    return bundle


def _is_valid(bundle: Path) -> bool:
    """Whether a cached bundle can be opened; it is removed if not."""
    try:
        Bundle.open(bundle)
    except BundleError as error:
        sys.stderr.write(f"the cached bundle is damaged: {error}\n")
        shutil.rmtree(bundle)
        return False
    return True


def _describe(output: str, checkpoint: str) -> str:
    """Return an error of `albert-serve export` without its options, which the caller lacks."""
    line = output.strip().rpartition("\n")[2].removeprefix("error: ")
    parts = re.split(r"(?<=[.;]) ", line)
    kept = [part for part in parts if not _OPTION.search(part)]
    if not kept or kept == parts:
        return line
    reason = " ".join(kept).rstrip(".;")
    return (
        f"{reason}. `albert-serve export {checkpoint} BUNDLE` has options for this; pass its "
        "BUNDLE here."
    )
