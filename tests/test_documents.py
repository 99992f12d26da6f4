"""Commands in the documents exist as printed, with their options, and links lead somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import training.commands
from albert_serve import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# Their commands are those of the version that trained the model.
CARDS = sorted((ROOT / "models").glob("*/*.md"))
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(.*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(
    r"(?:python -m (?P<module>benchmarks\b[\w.]*)"
    r"|(?:(?<=bin/)|(?<![\w/.-]))albert-serve (?P<command>[a-z]+)"
    r"|(?<!\S)make (?P<target>[a-z-]+))"
    r"(?P<rest>[^`\n#;&|]*)"
)
# In the help of a module.
EXAMPLE = re.compile(r"^  (?:albert-serve|torchrun) .*$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")


def code_in(text: str) -> Iterator[str]:
    """Blocks and inline spans of code, each command in one line."""
    yield from blocks_in(text)
    yield from INLINE.findall(FENCED.sub("", in_one_line(text)))


def blocks_in(text: str) -> Iterator[str]:
    """Blocks of code, each command in one line."""
    text = in_one_line(text)
    yield from FENCED.findall(text)
    yield from INDENTED.findall(FENCED.sub("", text))


def in_one_line(text: str) -> str:
    return text.replace("\\\n", " ")


def commands_of(document: Path) -> list[re.Match[str]]:
    text = document.read_text(encoding="utf-8")
    return [match for code in code_in(text) for match in COMMAND.finditer(code)]


FOUND = [match for document in DOCUMENTS for match in commands_of(document)]
MODULES = sorted({match["module"] for match in FOUND if match["module"]})
COMMANDS = sorted({match["command"] for match in FOUND if match["command"]})


def training_commands() -> list[str]:
    """Complete commands of training, in blocks of the documents and in the help of the modules."""
    modules = [file.read_text(encoding="utf-8") for file in (ROOT / "training").rglob("*.py")]
    texts = [line for module in modules for line in EXAMPLE.findall(in_one_line(module))]
    for document in DOCUMENTS:
        texts += blocks_in(document.read_text(encoding="utf-8"))
    commands = {
        f"{match['command']} {' '.join(match['rest'].split())}"
        for text in texts
        for match in COMMAND.finditer(text)
        if match["command"] in training.commands.COMMANDS
    }
    return sorted(command for command in commands if "..." not in command)


def run_help(capsys: pytest.CaptureFixture[str], module: str, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def assert_options(known: str, uses: list[str]) -> None:
    used = {option for use in uses for option in OPTION.findall(use)}
    assert used <= set(re.findall(r"--[a-z][\w-]*", known))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_the_options_that_are_printed(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    shown = run_help(capsys, f"{module}.__main__" if is_package else module)
    options, _, examples = shown.partition("\nexamples:\n")
    printed = [*COMMAND.finditer(examples.replace("\\\n", " ")), *FOUND]
    assert module in {match["module"] for match in printed[: -len(FOUND)]}
    assert_options(options, [match["rest"] for match in printed if match["module"] == module])


@pytest.mark.parametrize("command", training_commands())
def test_a_printed_command_of_training_is_complete(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all that the command asks for, and a run has an end."""
    verb, *words = shlex.split(command)
    module = importlib.import_module(training.commands.COMMANDS[verb][0])
    done = SimpleNamespace(status=0)
    if verb in ("pretrain", "finetune"):
        monkeypatch.setattr(module, verb, lambda config: done)
    else:
        monkeypatch.setattr(module, "report_errors", lambda command: 0)
    assert module.main(words) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_that_are_printed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, _, examples = run_help(capsys, cli.__name__, command).partition("\nexamples:\n")
    printed = [*COMMAND.finditer(in_one_line(examples)), *FOUND]
    assert command in {match["command"] for match in printed[: -len(FOUND)]}
    assert_options(options, [match["rest"] for match in printed if match["command"] == command])


def test_the_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {match["target"] for match in FOUND if match["target"]}
    assert used
    assert used <= targets


def test_the_documents_have_commands_of_all_kinds() -> None:
    assert {"benchmarks.engine", "benchmarks.serve"} <= set(MODULES)
    assert len(training_commands()) > 40
    assert {"serve", "score", "info", "import"} <= set(COMMANDS)
    assert {"finetune", "evaluate", "export"} <= set(COMMANDS)


def test_bentos_and_images_are_served_to_this_machine_alone() -> None:
    """BentoML and docker open the port to all otherwise, and no key is asked for."""
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    codes = [code for text in texts for code in code_in(text)]
    serves = [line for code in codes for line in re.findall(r"bentoml serve albert.*", code)]
    assert serves
    assert [line for line in serves if "--host 127.0.0.1" not in line] == []
    runs = [line for code in codes for line in re.findall(r"docker run .*", code)]
    assert len(runs) >= 4
    assert [line for line in runs if "-p 127.0.0.1:" not in line] == []


def anchors_of(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", document.read_text("utf-8")), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", [*DOCUMENTS, *CARDS], ids=lambda file: file.name)
def test_links_lead_somewhere(document: Path) -> None:
    for path, anchor in LINK.findall(FENCED.sub("", document.read_text(encoding="utf-8"))):
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not anchor or anchor in anchors_of(target), (path, anchor)


def test_the_architecture_names_files_and_symbols_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    places = re.findall(r"`([\w./-]+/[\w.-]*)(?::([\w.]+))?`", page)
    assert len(places) > 80
    for path, symbol in places:
        assert (ROOT / path).exists(), path
        for name in symbol.split(".") if symbol else ():
            defined = rf"^\s*(?:(?:async )?def |class ){name}\b|^{name}\b.* = "
            assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), (path, name)
