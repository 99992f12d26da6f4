"""`albert-serve info | import`: describe a bundle, or import it into BentoML's store."""

from __future__ import annotations

import argparse
from typing import Final

from albert_serve.bundle.checkpoint import find_bundle
from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.store import import_bundle, locate
from albert_serve.cli.options import check_home, serving_parser
from albert_serve.settings import STORE_PREFIX
from albert_serve.tasks.description import describe

_INFO_EXAMPLES: Final = """\
examples:
  albert-serve info models/base
  albert-serve info models/base --json | jq .card.sizes
"""
_IMPORT_EXAMPLES: Final = """\
examples:
  albert-serve import bundles/reviews
  albert-serve import bundles/reviews-int8 --name reviews:2024-05

The bundle is verified and copied. `bentoml models list` shows it. BENTOML_HOME is the folder of the
store.
"""


def info_parser(purpose: str) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    info = serving_parser("info", purpose, _INFO_EXAMPLES)
    info.add_argument(
        "bundle",
        metavar="BUNDLE",
        help="bundle: a folder, bentoml:NAME[:VERSION], or OWNER/NAME[@REVISION] of the Hub",
    )
    info.add_argument("--json", action="store_true", help="print what `/info` has, as JSON")
    info.set_defaults(run=_info)
    return info


def import_parser(purpose: str) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    importing = serving_parser("import", purpose, _IMPORT_EXAMPLES)
    importing.add_argument("bundle", metavar="BUNDLE", help="folder of the bundle")
    importing.add_argument(
        "--name",
        "--tag",
        dest="tag",
        metavar="NAME[:VERSION]",
        help="tag in the store (default: the folder's name, and the bundle's revision as version)",
    )
    importing.set_defaults(run=_import)
    return importing


def _info(options: argparse.Namespace) -> int:
    bundle = Bundle.open(locate(find_bundle(options.bundle, exports=False)))
    described = describe(bundle.manifest, str(bundle.folder), bundle.folder)
    print(described.model_dump_json(indent=2) if options.json else described.text())
    return 0


def _import(options: argparse.Namespace) -> int:
    check_home()
    tag = import_bundle(find_bundle(options.bundle, exports=False), options.tag)
    print(
        f"{tag} is in BentoML's model store. Serve it with albert-serve serve --bundle "
        f"{STORE_PREFIX}{tag}."
    )
    return 0
