"""The command line itself: usage, exit status, what is missing, and ``serializers``."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ran

from tensorpipe_ipc import cli, errors
from tensorpipe_ipc.cli import serializers
from tensorpipe_ipc.cli.failure import Failure
from tensorpipe_ipc.serializers import serializer_named

ROOT = Path(__file__).parents[2]


def _with_command(monkeypatch: pytest.MonkeyPatch, action: Callable[[argparse.Namespace], int]) -> int:
    monkeypatch.setattr(serializers, "run", action)
    return cli.main(["serializers"])


def _raises(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def action(arguments: argparse.Namespace) -> int:
        raise error

    return action


@pytest.mark.parametrize("error", [Failure("it failed"), errors.Refused("it failed")])
def test_our_errors_are_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of ours is one line on standard error and status 1, without a traceback."""
    assert _with_command(monkeypatch, _raises(error)) == 1
    assert capsys.readouterr() == ("", "tensorpipe-ipc: it failed\n")


@pytest.mark.parametrize(("library", "extra"), [("rich.table", "cli"), ("matplotlib.pyplot", "plot")])
def test_what_is_not_installed_is_named(
    library: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library of an extra that is not there: the line to type, and status 2."""
    assert _with_command(monkeypatch, _raises(ModuleNotFoundError("no", name=library))) == 2
    said = capsys.readouterr().err
    assert said == f"tensorpipe-ipc: this needs {library.split('.')[0]}: pip install 'tensorpipe-ipc[{extra}]'\n"


def test_any_other_missing_module_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that no extra brings is not explained away."""
    with pytest.raises(ModuleNotFoundError):
        _with_command(monkeypatch, _raises(ModuleNotFoundError("no", name="tensorpipe_ipc.nowhere")))


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a command with status 130 and no word."""
    assert _with_command(monkeypatch, _raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["latency", "--seconds", "x"], ["demo"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No command, an unknown one, or an argument that is none: usage, and status 2."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: tensorpipe-ipc")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` has one line about each command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "makes a pair of CURVE keys" in said
    assert "lists the serializers" in said


def test_each_command_has_a_line_of_help_and_a_row_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    """No command is without help, and ``docs/reference/command-line.md`` has each."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    page = (ROOT / "docs/reference/command-line.md").read_text()
    for name in cli.COMMANDS:
        assert re.search(rf"^ {{4}}{name}\n? {{2,}}\w", said, re.MULTILINE), name
        assert f"| `{name}" in page, name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` says which."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("tensorpipe-ipc ")


@pytest.mark.slow
def test_serializers_is_a_line_each() -> None:
    """``python -m tensorpipe_ipc serializers`` has a line for each, in 80 columns, and no warning of torch's."""
    done = ran("-m", "tensorpipe_ipc", "serializers")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["copies", "name", "numpy", "raw", "torch_save"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "copies", "layouts"),
    [
        ("raw", False, ["strided"]),
        ("numpy", True, ["strided"]),
        ("torch_save", True, ["strided", "sparse", "quantized", "nested"]),
    ],
)
def test_what_is_said_of_a_serializer_is_found_out(name: str, copies: bool, layouts: list[str]) -> None:
    """The command line tries each serializer on tensors to say whether it copies, and which layouts it takes.

    None of that is written down.
    """
    serializer: Any = serializer_named(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert serializers.copies_to_encode(serializer) is copies
        assert serializers.layouts(serializer) == layouts
        assert (torch.bfloat16 in serializers.dtypes(serializer)) is (name != "numpy")
