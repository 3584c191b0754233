"""The command line's parsing; it never needs torch."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from relaykv.engine.options import EngineOptions
from relaykv.server.cli import build_parser, main, package_version, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("2GB", 2_000_000_000),
        ("1.5 MiB", 3 << 19),
        ("512k", 512 << 10),
        ("10B", 10),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "2XB", "2 GiB more"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


def test_the_defaults_are_those_of_the_engine() -> None:
    options = build_parser().parse_args(["serve"])
    defaults = EngineOptions()
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.model == defaults.model
    assert options.dtype == defaults.dtype
    assert options.max_num_batched_tokens == defaults.max_num_batched_tokens
    assert options.relay_policy == defaults.relay_policy
    assert options.kv_memory is None


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "--port", "65536"],
        ["serve", "--port", "x"],
        ["serve", "--kv-memory", "2XB"],
        ["serve", "--threads", "0"],
        ["serve", "--dtype", "int4"],
        ["model"],
    ],
)
def test_wrong_usage_exits_with_two_and_says_why(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"relaykv {package_version()}\n"


def test_help_and_the_application_come_without_torch() -> None:
    program = (
        "import sys, relaykv.server.app, relaykv.server.cli as cli\n"
        "cli.build_parser().format_help()\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
