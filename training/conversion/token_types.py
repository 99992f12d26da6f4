"""Token types of pairs, as the tokenizer of a checkpoint's folder gives them to `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import processors

from albert_serve.bundle.manifest import TOKENIZER_FILE
from albert_serve.files import write_atomically
from albert_serve.tokenizer import AlbertTokenizer, pair_type
from training.model.provenance import read_object

# Classes of `transformers` 5 that give no token types by default; its earlier versions did.
_WITHOUT_TYPES: Final = ("Albert", "PreTrainedTokenizer", "TokenizersBackend")


def types_agree(folder: Path) -> bool:
    """Whether `tokenizer.json` gives pairs the types that `tokenizer_config.json` asks for."""
    file = folder / TOKENIZER_FILE
    if not _omits_types(folder) or not file.is_file():
        return True
    return pair_type(AlbertTokenizer.read(file)) == 0


def drop_types(source: Path, folder: Path) -> None:
    """Give both texts of a pair the type 0 in `tokenizer.json`, if the source's settings do.

    Args:
        source: a checkpoint's folder.
        folder: where its `tokenizer.json` was written.
    """
    file = folder / TOKENIZER_FILE
    if not _omits_types(source) or not file.is_file():
        return
    tokenizer = AlbertTokenizer.read(file)
    albert = AlbertTokenizer(AlbertTokenizer.read(file))
    cls, sep = albert.token(albert.cls_id), albert.token(albert.sep_id)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B:0", f"{sep}:0"],
        special_tokens=[(cls, albert.cls_id), (sep, albert.sep_id)],
    )
    write_atomically(file, tokenizer.to_str().encode())


def _omits_types(folder: Path) -> bool:
    file = folder / "tokenizer_config.json"
    settings: dict[str, Any] = read_object(file)
    names = settings.get("model_input_names")
    if names is not None or not file.is_file():
        return isinstance(names, list) and "token_type_ids" not in names
    version = str(read_object(folder / "config.json").get("transformers_version", ""))
    major = version.partition(".")[0]
    name = str(settings.get("tokenizer_class") or "Albert")
    return major.isdigit() and int(major) >= 5 and name.startswith(_WITHOUT_TYPES)
