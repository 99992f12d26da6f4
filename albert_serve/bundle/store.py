"""BentoML's model store: the folder of a bundle that it holds, and the import of one."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from albert_serve.bundle.manifest import CARD_FILE, MANIFEST_FILE, Bundle, Manifest
from albert_serve.errors import BundleError, BundleMissingError, ConfigError
from albert_serve.models_file import STORE_MODULE, store_tag

if TYPE_CHECKING:
    from bentoml import Tag

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

    An import that fails or is interrupted leaves no model.

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
        _save(bundle, parsed)
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


def _save(bundle: Bundle, tag: Tag) -> None:
    import bentoml
    from bentoml.exceptions import BentoMLException
    from bentoml.models import ModelContext

    manifest = bundle.manifest
    # `bentoml.models.create` would do the same, and tell BentoML of it.
    model = bentoml.Model.create(
        tag,
        module=STORE_MODULE,
        api_version="v1",
        labels={"precision": manifest.precision, "tasks": ",".join(manifest.tasks)},
        metadata=_shown(manifest),
        context=ModelContext(framework_name=STORE_MODULE, framework_versions={}),
        signatures={},
    )
    for name in (MANIFEST_FILE, *manifest.files, CARD_FILE):
        if name != CARD_FILE or (bundle.folder / name).is_file():
            shutil.copyfile(bundle.folder / name, model.path_of(name))
    Bundle.open(Path(model.path))
    model.flush()  # type: ignore[no-untyped-call]
    try:
        model.save()
    except BentoMLException as error:
        raise ConfigError(
            f"{tag} is in BentoML's model store already; give another with --name NAME:VERSION, "
            f"or remove that one: bentoml models delete {tag}"
        ) from error
    except BaseException:
        with contextlib.suppress(BentoMLException, OSError):
            bentoml.models.delete(tag)
        raise


def _shown(manifest: Manifest) -> dict[str, Any]:
    """Return what `bentoml models get` shows of a bundle."""
    fields = {"config", "tasks", "precision", "evaluation"}
    content = manifest.model_dump(mode="json", include=fields, exclude_none=True)
    return {"revision": manifest.revision, **content}
