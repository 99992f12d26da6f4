"""`albert-serve info | doctor | import`: a bundle, described, measured, or stored."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from albert_serve.bundle.checkpoint import find_bundle
from albert_serve.bundle.manifest import MANIFEST_FILE, Bundle, read_manifest
from albert_serve.bundle.store import import_bundle, locate
from albert_serve.cli.options import (
    add_runtime_options,
    add_workers,
    bundle_path,
    check_home,
    chosen,
    make_parser,
    one_bundle,
)
from albert_serve.compute import PretrainingSize, compare_compute
from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.doctor.description import describe_bundle
from albert_serve.doctor.layout import content_text
from albert_serve.doctor.measurement import measure_bundle
from albert_serve.errors import ConfigError
from albert_serve.files import read_small_file
from albert_serve.settings import STORE_PREFIX, Settings
from albert_serve.tasks.description import describe

_MAX_CONFIG_BYTES: Final = 1 << 20
_INFO_EXAMPLES: Final = """\
examples:
  albert-serve info models/base
  albert-serve info models/base --json | jq .sharing
  albert-serve info --compute
  albert-serve info --compute xlarge runs/base/checkpoint --steps 10000 --batch-size 256
"""
_DOCTOR_EXAMPLES: Final = """\
examples:
  albert-serve doctor
  albert-serve doctor models/base --workers 4 --prepack cache
  albert-serve doctor models/base --threads 1 --json | jq .speeds

It runs the bundle as the service would with the same settings, of which the options are some. It
takes seconds, and a minute or two for the largest models. Others who use the machine spoil times.
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
    info = make_parser("info", purpose, _INFO_EXAMPLES)
    one = info.add_mutually_exclusive_group(required=True).add_argument
    one("bundle", type=bundle_path, nargs="?", metavar="BUNDLE")
    what = "parameters and FLOPs of models, by name or folder (all names), each beside BERT's shape"
    one("--compute", nargs="*", metavar="MODEL", help=what)
    everything = "print JSON, of BUNDLE with its files, sharing, precision, parity and provenance"
    info.add_argument("--json", action="store_true", help=everything)
    add = info.add_argument_group("the pretraining run that --compute counts").add_argument
    for name, value in asdict(PretrainingSize()).items():
        option = name.removeprefix("num_").replace("_", "-")
        add(f"--{option}", dest=name, type=_count, default=value, metavar="N", help="(%(default)s)")
    info.set_defaults(run=_info)
    return info


def doctor_parser(purpose: str) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    doctor = make_parser("doctor", purpose, _DOCTOR_EXAMPLES)
    doctor.add_argument(
        "bundle",
        type=bundle_path,
        nargs="?",
        metavar="BUNDLE",
        help="a folder, bentoml:NAME[:VERSION], or OWNER/NAME[@REVISION] of the Hugging Face Hub "
        "(the one that is served by default)",
    )
    add_runtime_options(doctor)
    add_workers(doctor)
    doctor.add_argument("--json", action="store_true", help="for programs instead of people")
    doctor.set_defaults(run=_doctor)
    return doctor


def import_parser(purpose: str) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    importing = make_parser("import", purpose, _IMPORT_EXAMPLES)
    importing.add_argument("bundle", type=bundle_path, metavar="BUNDLE")
    importing.add_argument(
        "--name",
        "--tag",
        dest="tag",
        metavar="NAME[:VERSION]",
        help="the tag in the store (the folder's name, and the bundle's revision as version)",
    )
    importing.set_defaults(run=_import)
    return importing


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _info(options: argparse.Namespace) -> int:
    if options.compute is not None:
        _print({"compute": _compute(options)}, options)
        return 0
    bundle = Bundle.open(locate(find_bundle(options.bundle, exports=False)))
    if options.json:
        _print(describe_bundle(bundle), options)
    else:
        print(describe(bundle.manifest, str(bundle.folder), bundle.folder).text())
    return 0


def _compute(options: argparse.Namespace) -> list[dict[str, Any]]:
    size = PretrainingSize(
        num_steps=options.num_steps, batch_size=options.batch_size, length=options.length
    )
    rows = [
        row
        for name in options.compute or PRESETS
        for row in compare_compute(name, _named_config(name), size)
    ]
    return [asdict(row) for row in rows]


def _named_config(name: str) -> AlbertConfig:
    """Return the sizes of a preset, a bundle, a checkpoint's folder or a `config.json`."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(os.path.expanduser(name))
    if (path / MANIFEST_FILE).is_file():
        return AlbertConfig.from_hf(read_manifest(path).config)
    try:
        file = path / "config.json" if path.is_dir() else path
        hf = json.loads(read_small_file(file, _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--compute {name}: {error}; give {', '.join(PRESETS)}, or a model's folder"
        ) from error
    if not isinstance(hf, dict):
        raise ConfigError(f"--compute {name}: {file} is not a JSON object")
    return AlbertConfig.from_hf(hf)


def _doctor(options: argparse.Namespace) -> int:
    settings = Settings.from_environment(chosen(options))
    measured = measure_bundle(one_bundle(settings), settings.runtime, settings.num_workers)
    _print(asdict(measured), options)
    return 0


def _import(options: argparse.Namespace) -> int:
    check_home()
    tag = import_bundle(find_bundle(options.bundle, exports=False), options.tag)
    print(f"{tag} is in BentoML's model store; albert-serve serve --bundle {STORE_PREFIX}{tag}")
    return 0


def _print(content: dict[str, Any], options: argparse.Namespace) -> None:
    as_json = json.dumps(content, indent=2, ensure_ascii=False)
    print(as_json if options.json else content_text(content))
