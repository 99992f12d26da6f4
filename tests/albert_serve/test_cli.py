"""The command line: output, errors and imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

import albert_serve
import export.commands
import training.commands
from albert_serve.cli import main
from tests.albert_serve.support import (
    before_each_program,
    free_port,
    running_service,
    service_environment,
)

pytestmark = pytest.mark.process

SERVING = ["serve", "score", "info", "import"]


def test_info_describes_a_bundle(bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle_dir), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    labels = {task["name"]: task["labels"] for task in described["tasks"]}
    assert labels["text-classification"] == ["negative", "positive"]
    sizes = described["card"]["sizes"]
    assert (sizes["hidden_size"], sizes["num_layers"]) == (64, 3)
    assert sizes["weights_bytes"] == (bundle_dir / "model.safetensors").stat().st_size
    assert main(["info", str(bundle_dir)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{bundle_dir}: an ALBERT in fp32, revision ")
    assert re.search(r"^  text-classification \(negative, positive\)$", text, re.MULTILINE)


def test_info_ends_quietly_if_its_reader_has_ended(bundle_dir: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "albert_serve", "info", str(bundle_dir)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "./nowhere"], "nowhere"),
        (["serve", "--bundle", "./x", "--threads", "no"], "ALBERT_SERVE_THREADS is"),
    ],
)
def test_an_error_is_one_line_and_status_1(
    arguments: list[str],
    message: str,
    failure: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in failure(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["sing"], ["score", "in.jsonl"], ["info"], ["serve", "--device", "tpu"]),
        ["serve", "--port", "x"],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: .*\. See `albert-serve( \w+)? --help`\.", line)


@pytest.fixture
def failing_to_serve(
    bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[..., str]
) -> Callable[..., str]:
    """Gives the one line that `albert-serve serve` says in place of serving."""
    monkeypatch.setenv("BENTOML_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("the service was started"))
    return partial(failure, "serve", "--bundle", bundle_dir, "--port", free_port())


def test_an_address_that_cannot_be_had_is_one_line(failing_to_serve: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = failing_to_serve("--port", str(port))
    assert line.startswith(f"Cannot listen on port {port} of 127.0.0.1: [Errno 98] Address")
    line = failing_to_serve("--host", "192.0.2.1")
    assert "of 192.0.2.1: [Errno 99] Cannot assign" in line
    assert "port must be 0-65535" in failing_to_serve("--port", "65536")


def test_a_user_without_a_home_can_serve(bundle_dir: Path, tmp_path: Path) -> None:
    """A container may use a user id without an entry in passwd."""
    environment = service_environment(bundle_dir, tmp_path)
    environment |= before_each_program(tmp_path, "import pwd; pwd.getpwuid = {}.__getitem__")
    for variable in ("HOME", "BENTOML_HOME", "XDG_CACHE_HOME"):
        environment.pop(variable, None)
    environment["TMPDIR"] = str(tmp_path)
    with running_service(environment, tmp_path, ("albert_serve", "serve")) as service:
        reply = httpx.post(f"{service.url}/fill-mask", json={"inputs": "The [MASK] run."})
        assert reply.status_code == 200
    assert not (tmp_path / "~").exists()


def test_a_home_that_cannot_be_written_to_is_one_line(
    failing_to_serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENTOML_HOME")
    monkeypatch.setenv("HOME", "/proc")
    line = failing_to_serve()
    assert line.startswith("BentoML cannot write to its folder /proc/bentoml: ")
    assert "BENTOML_HOME" in line


@pytest.mark.parametrize(
    "command", ["", *SERVING, *training.commands.COMMANDS, *export.commands.COMMANDS]
)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: albert-serve {command}")
    assert f"examples:\n  albert-serve {command or 'serve'}" in shown


def test_the_overview_lists_all_commands_and_imports_none() -> None:
    program = "import sys; from albert_serve.cli import main\n"
    program += "try: main(['--help'])\nfinally: print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    serving, _, others = shown.partition("\ntraining and export:\n")
    assert re.findall(r"^  (\w+) +[a-z].*", serving, re.MULTILINE) == SERVING
    assert {"vocab", "finetune", "export"} <= {
        *re.findall(r"^  (\w+) +[a-z]", others, re.MULTILINE)
    }
    assert not {"torch", "numpy", "bentoml", "onnx"} & {*shown.splitlines()[-1].split()}


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        *(("serve", "filelock", "serve"), ("finetune", "torch", "train")),
        ("export", "onnx", "train"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(
    command: str, missing: str, extra: str
) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"from albert_serve.cli import main; sys.exit(main([{command!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: `albert-serve {command}` needs {missing}, which is not installed. Run pip install "
        f"'albert-serve[{extra}]', or in a clone pip install '.[{extra}]'.\n"
    )


def test_no_character_ends_a_command(bundle_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle_dir, tmp_path / "好")
    serving = f"from albert_serve.cli import main; main(['info', {str(tmp_path / '好')!r}])"
    training = "from training.errors import report_errors; report_errors(lambda: print('好') or 0)"
    for program in (serving, training):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert done.stderr == ""
        assert r"\u597d" in done.stdout


def test_a_terminal_does_not_obey_the_text_of_an_error(
    tmp_path: Path, failure: Callable[..., str]
) -> None:
    table = tmp_path / "in.csv"
    table.write_text("a\x1b[2J\x9b\N{RIGHT-TO-LEFT OVERRIDE}b,é\n1,2\n", encoding="utf-8")
    line = failure("score", "--task", "text-classification", table, tmp_path / "out.csv")
    assert r"it has a\x1b[2J\x9b\u202eb, é." in line


PACKAGE = Path(albert_serve.__file__).parent
MODULES = sorted(
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    for file in PACKAGE.rglob("*.py")
    if file.name not in ("__init__.py", "__main__.py")
)
TRAINING_STACK = {
    *("torch", "onnx", "transformers", "sentencepiece", "safetensors"),
    *("training", "export"),
}
SERVING_STACK = {"numpy", "tokenizers", "onnxruntime", "bentoml"}


def imported_by(*modules: str) -> set[str]:
    """The top-level packages in a fresh interpreter after importing these modules."""
    code = (
        f"import sys, json; import {', '.join(modules)}; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_no_module_imports_the_training_stack() -> None:
    assert {"albert_serve.bundle.manifest", "albert_serve.config"} <= set(MODULES)
    assert not imported_by(*MODULES) & TRAINING_STACK


def test_the_client_needs_no_serving_stack() -> None:
    modules = ("client", "errors", "config", "api.schemas", "bundle.manifest")
    imported = imported_by(*(f"albert_serve.{module}" for module in modules))
    assert not imported & (SERVING_STACK | TRAINING_STACK)


def test_serving_and_the_command_line_need_no_pyarrow() -> None:
    assert "pyarrow" not in imported_by("albert_serve.cli", "albert_serve.server.handlers")
