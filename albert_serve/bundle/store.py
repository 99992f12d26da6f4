"""BentoML's model store: the folder of a bundle that it holds, and the import of one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from albert_serve.bundle.manifest import MANIFEST_FILE, WEIGHTS_FILE, Bundle
from albert_serve.errors import BundleError, BundleMissingError, ConfigError
from albert_serve.files import partial_path, put_in_place, sync, write_atomically
from albert_serve.models_file import STORE_MODULE, STORE_PREFIX, store_tag

if TYPE_CHECKING:
    from bentoml import Tag

_MODEL_CARD: Final = "README.md"
_LATEST: Final = "latest"


def locate(bundle: Path) -> Path:
    """Return the folder of a bundle, which may be named by its tag in the model store.

    Raises:
        BundleMissingError: the store has no model of the tag.
        BundleError: the tag is invalid or ambiguous, or the store cannot be read.
    """
    tag = store_tag(bundle)
    if tag is None:
        return bundle
    # BentoML is imported for a tag only: it is not needed to score a file or inspect a folder.
    import bentoml
    from bentoml.exceptions import BentoMLException, NotFound

    try:
        return Path(bentoml.models.get(tag).path)
    except NotFound as error:
        raise BundleMissingError(
            f"{bundle} is not in BentoML's model store; `bentoml models list` shows its models, "
            "and `albert-serve import BUNDLE` adds one"
        ) from error
    except (BentoMLException, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise BundleError(f"{bundle} cannot be read from the model store: {reason}") from error


def import_bundle(folder: Path, tag: str | None = None) -> str:
    """Copy a bundle into the model store, verified before and after.

    An interrupted import leaves no model: the files are put into the store by one renaming.

    Args:
        tag: NAME or NAME:VERSION; by default the folder's name. The default version is the
            bundle's revision.

    Returns:
        NAME:VERSION.

    Raises:
        BundleError: the folder is no valid bundle.
        ConfigError: the tag is invalid or exists, or the store cannot be written to.
    """
    bundle = Bundle.open(folder)
    parsed = _parse(tag or Path(os.path.abspath(folder)).name, bundle.manifest.revision)
    try:
        _put(bundle, parsed)
    except OSError as error:
        raise ConfigError(
            f"BentoML's model store cannot be written to: {error}; set BENTOML_HOME to a folder "
            "that can be"
        ) from error
    return str(parsed)


def _parse(text: str, revision: str) -> Tag:
    from bentoml import Tag

    name, colon, version = text.partition(":")
    try:
        # BentoML would change capitals, and say so in its log.
        if text != text.lower() or version == _LATEST or (colon and not version):
            raise ValueError(text)
        return Tag(name, version or revision)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} cannot be a tag of the model store; it is NAME or NAME:VERSION, each of up "
            "to 63 of a-z 0-9 . _ - with a letter or digit at both ends, and not 'latest'; give "
            "another with --name"
        ) from error


def _put(bundle: Bundle, tag: Tag) -> None:
    from bentoml._internal.configuration.containers import BentoMLContainer

    target = Path(BentoMLContainer.model_store_dir.get(), tag.path())
    _check_absent(target, tag)
    # BentoML's folder for what it builds: on the store's file system, and never listed.
    with tempfile.TemporaryDirectory(dir=BentoMLContainer.tmp_bento_store_dir.get()) as workplace:
        partial = partial_path(Path(workplace) / target.name)
        _copy(bundle, partial)
        Bundle.open(partial)
        _describe(bundle, tag, partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            put_in_place(partial, target)
        except OSError:
            _check_absent(target, tag)  # another import was faster
            raise
    try:
        write_atomically(target.parent / _LATEST, str(tag.version).encode())
    except BaseException:
        shutil.rmtree(target)
        raise


def _check_absent(target: Path, tag: Tag) -> None:
    if target.exists():
        raise ConfigError(
            f"{tag} is in BentoML's model store already; give another with --name NAME:VERSION, "
            f"or remove that one: bentoml models delete {tag}"
        )


def _copy(bundle: Bundle, target: Path) -> None:
    target.mkdir()
    for name in (MANIFEST_FILE, *bundle.manifest.files, _MODEL_CARD):
        if name != _MODEL_CARD or (bundle.folder / name).is_file():
            shutil.copyfile(bundle.folder / name, target / name)
            sync(target / name)


def _describe(bundle: Bundle, tag: Tag, folder: Path) -> None:
    """Write `model.yaml`, which makes the folder a model of BentoML's."""
    from bentoml._internal.models.model import MODEL_YAML_FILENAME, ModelInfo
    from bentoml.models import ModelContext, ModelOptions

    manifest = bundle.manifest
    info = ModelInfo(
        tag=tag,
        module=STORE_MODULE,
        api_version="v1",
        labels={"precision": manifest.precision, "tasks": ",".join(manifest.tasks)},
        metadata=_metadata(bundle),
        options=ModelOptions(),
        context=ModelContext(framework_name=STORE_MODULE, framework_versions={}),
        signatures={},
    )
    file = folder / MODEL_YAML_FILENAME
    with file.open("w", encoding="utf-8") as stream:
        info.dump(stream)
    sync(file)


def _metadata(bundle: Bundle) -> dict[str, Any]:
    manifest, config = bundle.manifest, bundle.config
    return {
        "revision": manifest.revision,
        "tasks": {
            name: {"labels": task.labels or [], "outputs": task.num_outputs}
            for name, task in manifest.heads.items()
        },
        "precision": manifest.precision,
        "sizes": {
            "hidden_size": config.hidden_size,
            "num_layers": config.num_layers,
            "vocab_size": config.vocab_size,
            "max_positions": config.max_positions,
            "weights_bytes": manifest.files[WEIGHTS_FILE].size,
        },
        "evaluation": manifest.evaluation,
    }


def reference(tag: str) -> str:
    """Return what names a stored bundle where a bundle's folder may be named."""
    return f"{STORE_PREFIX}{tag}"
