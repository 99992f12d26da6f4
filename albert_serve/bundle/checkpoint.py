"""Checkpoints in place of bundles. Each checkpoint is exported into the cache once."""

from __future__ import annotations

import hashlib
import os
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
# A folder with one of these files is a checkpoint: a model, an adapter, or one in Google's format.
_CONFIG_FILES: Final = (CONFIG_FILE, "adapter_config.json", "albert_config.json")
# The second pattern matches the parts of a sentence-transformers model, such as 1_Pooling.
_CHECKPOINT_FILES: Final = ("*", "[0-9]_*/*")


def find_bundle(
    reference: str | os.PathLike[str],
    precision: Precision | None = None,
    *,
    exports: bool = True,
) -> Path:
    """Return a bundle's folder or tag, after downloading a Hub model and exporting a checkpoint.

    A separate process exports, which requires the extra `train`. The cache stores the bundle of a
    folder under the hash of its files, and the bundle of a model on the Hub under its commit.

    Args:
        reference: folder, `bentoml:NAME[:VERSION]`, or a name on the Hub, OWNER/NAME[@REVISION].
        precision: precision of the export (default: fp32).
        exports: whether a checkpoint is allowed.
    """
    path = Path(reference)
    if store_tag(path) is not None:
        return _bundle(path, precision)
    folder = local_path(reference)
    if folder is None:
        return _find_on_hub(os.fspath(reference), precision, exports)
    if not exports or not _is_checkpoint(folder):
        return _bundle(folder, precision)
    folder = Path(os.path.abspath(folder))  # keeps the name of a link
    return _export(str(folder), folder.name, [*_hashes(folder)], precision)


def _private_folder(name: str) -> Path:
    """Return a folder of the cache that only this user can change."""
    cache = cache_folder()
    if cache is None:
        raise ConfigError(f"The cache folder is not set. Set {CACHE_VARIABLE}.")
    folder = cache / name
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error}. Set {CACHE_VARIABLE} to a writable folder."
        ) from error
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ConfigError(
            f"Other users can write to {folder}, and so could choose the model. Run `chmod go-w "
            f"{folder}` if it is yours, or set {CACHE_VARIABLE} to a folder of your own."
        )
    return folder


def _find_on_hub(reference: str, precision: Precision | None, exports: bool) -> Path:
    # These are imported only here, because the Hub's client takes time to import.
    from albert_serve.bundle.download import download_bundle
    from albert_serve.hub import HubModel, download

    model = HubModel.parse(reference)
    if model is None:
        return _bundle(Path(reference), precision)
    snapshot = download(model, (MANIFEST_FILE, CONFIG_FILE))
    if not exports or not _is_checkpoint(snapshot):
        return _bundle(download_bundle(model, snapshot, _private_folder("hub")), precision)
    pinned = f"{model.repo_id}@{snapshot.name}"
    return _export(pinned, model.repo_id.rpartition("/")[2], [pinned], precision)


def _is_checkpoint(folder: Path) -> bool:
    is_bundle = (folder / MANIFEST_FILE).is_file()
    return not is_bundle and any((folder / name).is_file() for name in _CONFIG_FILES)


def _bundle(reference: Path, precision: Precision | None) -> Path:
    if precision is not None:
        raise ConfigError(
            f"{reference} is not a checkpoint, so it cannot be exported in another precision. Omit "
            "--precision."
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
    exports = _private_folder("exports")
    bundle = exports / key / name
    with FileLock(exports / ".lock"):
        if bundle.is_dir() and _is_valid(bundle):
            return bundle
        for leftover in exports.glob("*/.*"):  # killed exports leave these folders
            shutil.rmtree(leftover, ignore_errors=True)
        bundle.parent.mkdir(mode=0o755, exist_ok=True)  # some umasks would let the group write
        sys.stderr.write(f"Exporting {checkpoint} in {precision} into the cache.\n")
        command = [sys.executable, "-m", "albert_serve", "export", checkpoint, str(bundle)]
        command += ["--precision", precision]
        if precision == "fp32":  # the bundle has the checkpoint's weights, and so its quality
            command.append("--no-quality")
        process = subprocess.run(  # noqa: S603  # our own program
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    if process.returncode:
        error = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise BundleError(
            f"`albert-serve export {checkpoint} --precision {precision}` failed: "
            f"{error.removeprefix('error: ')}"
        )
    return bundle


def _is_valid(bundle: Path) -> bool:
    """Return whether a cached bundle can be opened, and remove it if not."""
    try:
        Bundle.open(bundle)
    except BundleError as error:
        sys.stderr.write(f"The cached bundle is damaged: {error}\n")
        shutil.rmtree(bundle)
        return False
    return True
