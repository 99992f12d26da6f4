"""BentoML's model store: finding bundles by tag, and importing them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from albert_serve.bundle.manifest import CARD_FILE, MANIFEST_FILE, Bundle
from albert_serve.errors import BundleMissingError, ConfigError
from albert_serve.settings import store_tag


def locate(bundle: Path) -> Path:
    """Return the folder of a bundle, given its folder or its tag in the model store."""
    tag = store_tag(bundle)
    if tag is None:
        return bundle
    # BentoML is imported only here, because it is not needed to score a file or inspect a folder.
    import bentoml
    from bentoml.exceptions import BentoMLException

    try:
        return Path(bentoml.models.get(tag).path)
    except (BentoMLException, ValueError, OSError) as error:
        raise BundleMissingError(
            f"{bundle} cannot be opened: {' '.join(str(error).split())}. `bentoml models list` "
            "shows the models of the store."
        ) from error


def import_bundle(folder: Path, tag: str | None = None) -> str:
    """Copy a bundle into the model store.

    Args:
        tag: NAME or NAME:VERSION (default: the folder's name). The default version is the bundle's
            revision.

    Returns:
        The complete tag, NAME:VERSION.
    """
    import bentoml
    from bentoml.exceptions import BentoMLException

    bundle = Bundle.open(folder)
    manifest = bundle.manifest
    name, _, version = (tag or Path(os.path.abspath(folder)).name).partition(":")
    # BentoML would replace its file `latest`, which names the last version, with a folder.
    tag = f"{name}:{manifest.revision if version in ('', 'latest') else version}"
    labels = {"precision": manifest.precision, "tasks": ",".join(manifest.tasks)}
    try:
        with bentoml.models.create(tag, labels=labels) as model:
            for file in (MANIFEST_FILE, *manifest.files, CARD_FILE):
                if file != CARD_FILE or (bundle.folder / file).is_file():
                    shutil.copyfile(bundle.folder / file, model.path_of(file))
    except (BentoMLException, ValueError, OSError) as error:
        raise ConfigError(
            f"{folder} cannot be imported as {tag}: {' '.join(str(error).split())}. Choose another "
            "tag with --name, or another store with BENTOML_HOME."
        ) from error
    return str(model.tag)
