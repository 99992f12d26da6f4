"""The commands, links, names and numbers in the documents."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from albert_serve import cli
from tests.test_shipped import METRIC

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# The options in a card belong to the version that trained the model, so only links are checked.
CARDS = sorted((ROOT / "models").glob("*/*.md"))
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(.*)$", re.MULTILINE)
COMMAND = re.compile(
    r"(?:python -m (?P<module>benchmarks\b[\w.]*)"
    r"|(?:(?<=bin/)|(?<![\w/.-]))albert-serve (?P<command>[a-z]+)"
    r"|(?<!\S)make (?P<target>[a-z-]+))"
    r"(?P<rest>[^`\n#;&|]*)"
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")
RESULTS = ROOT / "benchmarks" / "results"
RESULT_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)*benchmarks/results/[\w.-]+)\)")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-]|\.\d)")


def code_in(document: Path) -> Iterator[str]:
    """Return the blocks and inline spans of code, with each command in one line."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    prose = FENCED.sub("", text)
    yield from [*FENCED.findall(text), *INDENTED.findall(prose), *re.findall(r"`([^`\n]+)`", prose)]


CODE = [code for document in DOCUMENTS for code in code_in(document)]
MATCHES = [match for code in CODE for match in COMMAND.finditer(code)]
MODULES = sorted({match["module"] for match in MATCHES if match["module"]})
COMMANDS = sorted({match["command"] for match in MATCHES if match["command"]})


@pytest.mark.parametrize(
    ("group", "name"),
    [*(("module", name) for name in MODULES), *(("command", name) for name in COMMANDS)],
)
def test_the_options_in_the_documents_and_in_the_examples_of_a_command_exist(
    group: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help of each command has an example."""
    program, words = cli.__name__, [name]
    if group == "module":
        spec = importlib.util.find_spec(name)
        is_package = spec is not None and spec.submodule_search_locations is not None
        program, words = f"{name}.__main__" if is_package else name, []
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(program).main([*words, "--help"])
    assert caught.value.code == 0
    options, _, help_examples = capsys.readouterr().out.partition("\nexamples:\n")
    examples = list(COMMAND.finditer(help_examples.replace("\\\n", " ")))
    assert name in {match[group] for match in examples}
    uses = [match["rest"] for match in [*examples, *MATCHES] if match[group] == name]
    used_options = {option for use in uses for option in OPTION.findall(use)}
    assert used_options <= set(re.findall(r"--[a-z][\w-]*", options))


def test_the_make_targets_in_the_documents_exist() -> None:
    """The documents have commands of all kinds."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used_targets = {match["target"] for match in MATCHES if match["target"]}
    assert {"test"} <= used_targets <= targets
    assert {"benchmarks.engine", "benchmarks.serve"} <= set(MODULES)
    assert {"serve", "score", "info", "import", "finetune", "export"} <= set(COMMANDS)


def test_commands_that_serve_bentos_and_images_open_the_port_only_locally() -> None:
    """By default, BentoML and docker open the port to all machines, and no key is required."""
    for program, address, min_commands in (
        ("bentoml serve albert", "--host 127.0.0.1", 1),
        ("docker run ", "-p 127.0.0.1:", 4),
    ):
        lines = [line for code in CODE for line in re.findall(f"{program}.*", code)]
        assert len(lines) >= min_commands
        assert [line for line in lines if address not in line] == []


def anchors_of(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", document.read_text("utf-8")), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("document", [*DOCUMENTS, *CARDS], ids=lambda file: file.name)
def test_the_files_and_headings_that_links_point_to_exist(document: Path) -> None:
    for path, anchor in LINK.findall(FENCED.sub("", document.read_text(encoding="utf-8"))):
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not anchor or anchor in anchors_of(target), (path, anchor)


def test_the_files_and_symbols_in_the_pages_for_maintainers_exist() -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("architecture.md", "contributing.md")]
    paths = re.findall(r"`([\w./-]+/[\w.-]*)(?::[\w.]+)?`", pages[0])
    assert len(paths) > 80
    assert [path for path in paths if not (ROOT / path).exists()] == []
    symbols = [match for page in pages for match in re.findall(r"`([\w./-]+):([\w.]+)`", page)]
    assert len(symbols) > 60
    for path, symbol in symbols:
        for name in symbol.split("."):
            definition = rf"^\s*(?:(?:async )?def |class ){name}\b|^{name}\b.* = "
            assert re.search(definition, (ROOT / path).read_text(), re.MULTILINE), (path, name)


def numbers_in(text: str) -> set[str]:
    return set(NUMBER.findall(text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_numbers_are_in_the_results_that_they_link_to(document: Path) -> None:
    """In the README, every decimal number has such a link."""
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    for words, path in RESULT_LINK.findall(text):
        results = (document.parent / path).read_text(encoding="utf-8")
        assert numbers_in(words) <= numbers_in(results), words
    if document == ROOT / "README.md":
        unlinked_numbers = numbers_in(RESULT_LINK.sub("", text))
        assert [number for number in unlinked_numbers if "." in number] == []


def test_the_numbers_of_the_model_card_are_in_the_manifest_and_the_results() -> None:
    """Checks the numbers before the examples, except names and sizes of data sets.

    `test_shipped` compares the rows of metrics with the manifest.
    """
    folder = ROOT / "models" / "albert-small-en"
    card = (folder / "README.md").read_text(encoding="utf-8")
    first_screen = card.split("\n---\n", 1)[1].split("\n## ", 1)[0]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    evaluation, config = manifest["evaluation"], manifest["config"]
    with safe_open(folder / "model.safetensors", "np") as weights:
        sizes = [math.prod(weights.get_slice(name).get_shape()) for name in weights.keys()]  # noqa: SIM118
    packaged = [*(ROOT / "albert_serve" / "models" / folder.name).iterdir()]
    integers = [sum(sizes), *config.values(), *evaluation.values()]
    sources = {f"{number:,}" for number in integers if type(number) is int}
    sources |= {f"{100 * value:.1f}" for value in evaluation.values() if isinstance(value, float)}
    sources |= {f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}"}
    sources |= {f"{sum(file.stat().st_size for file in packaged) / 1e6:.1f}"}
    sources |= numbers_in((RESULTS / "embeddings.md").read_text(encoding="utf-8"))
    counts = [row["texts"] for row in evaluation["text_classification_classes"].values()]
    sources |= {f"{max(counts) / sum(counts):.3f}"}
    sources |= {match["value"] for match in METRIC.finditer(first_screen)}
    names = re.compile(r"SQuAD [\d.]+|\(chance: 0\.5\)|24 Wikipedia|254 Wikipedia")
    assert numbers_in(names.sub("", first_screen)) <= sources
