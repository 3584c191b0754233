"""`relaykv profile` from its arguments to its files, mostly on a model with planted deviations."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from fake_engine import ByteTokenizer, ChatMlTemplate
from planted_model import (
    Reading,
    planted_handoffs,
    planted_model,
    planted_parts,
)

from relaykv.engine import assembly, profiler
from relaykv.engine.assembly import EngineParts
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Bands
from relaykv.engine.relay_profile import (
    BandsSource,
    ProfileError,
    choose_bands,
    read_profile,
)
from relaykv.server import profile_command
from relaykv.server.chat_template import HuggingFaceTemplate
from relaykv.server.cli import build_parser, main
from relaykv.server.model_command import prompt_of
from relaykv.server.profile_command import make_report

_NUM_LAYERS = 8
_READINGS = [Reading(0.0), *[Reading(1.0)] * 3, *[Reading(0.4)] * 4]
_BANDS = Bands(0, 3, 4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of everything that is cached."""
    monkeypatch.setenv("RELAYKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def handoffs(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    lines = [json.dumps(asdict(handoff)) for handoff in planted_handoffs(3)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, home: Path) -> list[EngineOptions]:
    """What the command has asked the engine for; it gets a planted model, which first mixes."""
    options: list[EngineOptions] = []

    def prepare(wanted: EngineOptions) -> EngineParts:
        assert not home.exists()
        options.append(wanted)
        return planted_parts(planted_model(_READINGS, mixing_layer=0))

    monkeypatch.setattr(assembly, "prepare", prepare)
    template = classmethod(lambda _class, _folder: ChatMlTemplate())
    monkeypatch.setattr(HuggingFaceTemplate, "from_folder", template)
    return options


def test_a_profile_is_written_where_serve_finds_it_with_a_picture_beside_it(
    asked: list[EngineOptions], home: Path, handoffs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile", "--handoffs", str(handoffs), "--tokens", "64", "--threads", "1"]

    assert main(arguments) == 0

    path = home / "profiles" / "planted.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["inject"], content["select"], content["stop"]) == (0, 3, 4)
    assert content["model"] == content["fingerprint"] == "planted"
    assert (content["num_handoffs"], content["num_tokens"]) == (3, 63 * 4)
    assert content["dtype"] == "float32"
    assert content["command"] == (
        "relaykv profile --model default --tokens 64 --handoffs own.jsonl "
        "--device auto --dtype auto"
    )
    assert all(len(curve) == _NUM_LAYERS for curve in content["curves"].values())
    picture = path.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    chosen = choose_bands(None, "planted", _NUM_LAYERS)
    assert (chosen.bands, chosen.source) == (_BANDS, BandsSource.OWN)
    (options,) = asked
    assert (options.deterministic, options.num_threads) == (True, 1)
    printed = capsys.readouterr()
    assert "3 of 3 hand-offs relayed 252 tokens" in printed.out
    assert "bands   inject 0, select 3, stop 4" in printed.out
    assert "3 hand-offs are few" in printed.err
    assert "3.0 of 3 hand-offs" in printed.err


@pytest.mark.usefixtures("asked")
def test_two_runs_write_the_same_bytes(
    tmp_path: Path, handoffs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        arguments = ["--handoffs", str(handoffs), "--limit", "2", "--output", str(file)]
        assert main(["profile", *arguments]) == 0
    assert capsys.readouterr().out.count("2 of 2 hand-offs") == 2
    assert files[0].read_bytes() == files[1].read_bytes()
    assert read_profile(files[0], _NUM_LAYERS).bands == _BANDS
    assert files[0].with_suffix(".png").is_file()


@pytest.mark.usefixtures("asked")
def test_without_matplotlib_there_is_a_profile_and_a_word_about_the_picture(
    tmp_path: Path,
    handoffs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(profile_command, "can_draw", lambda: False)
    output = tmp_path / "p.json"

    assert main(["profile", "--handoffs", str(handoffs), "--output", str(output)]) == 0

    assert output.is_file()
    assert not output.with_suffix(".png").exists()
    printed = capsys.readouterr()
    assert "pip install 'relaykv[profile]'" in printed.err
    assert "picture" not in printed.out


@pytest.mark.usefixtures("asked")
def test_an_interrupted_run_writes_nothing_and_says_so_by_its_exit_code(
    home: Path, handoffs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiler, "kv_deviation", interrupt)

    assert main(["profile", "--handoffs", str(handoffs)]) == 130
    assert not home.exists()


@pytest.mark.usefixtures("asked")
def test_failures_are_told_in_one_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"id": 1}\n', encoding="utf-8")
    for path, reason in ((file, "line 1: "), (tmp_path / "none.jsonl", "cannot read")):
        assert main(["profile", "--handoffs", str(path)]) == 1
        line = capsys.readouterr().err
        assert line.startswith("relaykv: error: ")
        assert reason in line
        assert line.count("\n") == 1
    assert main(["profile", "--tokens", "900"]) == 1  # the planted model takes 1024 in all
    assert "hand-off 'cache-module-plan' may need" in capsys.readouterr().err
    assert not home.exists()


@pytest.mark.parametrize(
    "arguments", [["--tokens", "47"], ["--output", "p.png"], ["--limit", "0"], ["--dtype", "int4"]]
)
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["profile", *arguments])
    assert exited.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_help_names_every_argument() -> None:
    parser = build_parser()
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    text = commands.choices["profile"].format_help()
    for name in ("--model", "--handoffs", "--limit", "--tokens", "--output", "--device"):
        assert name in text


class _NoSystemTemplate(ChatMlTemplate):
    def render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("system role is not supported")
        return super().render(messages, tools)


def test_prompts_are_rendered_as_the_server_would() -> None:
    tokenizer = ByteTokenizer()

    def text(template: ChatMlTemplate, system: str) -> str:
        ids = prompt_of(template, tokenizer)(system, "Go.")
        return tokenizer.decode(ids, skip_special_tokens=False)

    assistant = "<|im_end|>\n<|im_start|>assistant\n"
    user = f"<|im_start|>user\nGo.{assistant}"
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert text(ChatMlTemplate(), "Be brief.") == system + user
    assert text(ChatMlTemplate(), "") == user
    merged = f"<|im_start|>user\nBe brief.\n\nGo.{assistant}"
    assert text(_NoSystemTemplate(), "Be brief.") == merged


def test_no_bands_are_made_from_nothing() -> None:
    with pytest.raises(ProfileError, match="no answer came back long enough"):
        make_report([], "m", "f", "float32", "relaykv profile")


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_is_profiled(default_model_dir: Path, tmp_path: Path) -> None:
    assert default_model_dir.is_dir()
    output = tmp_path / "p.json"

    assert main(["profile", "--limit", "4", "--tokens", "64", "--output", str(output)]) == 0

    content = json.loads(output.read_text(encoding="utf-8"))
    similarity = content["curves"]["value_similarity"]
    assert content["num_handoffs"] == 4
    assert 1 <= content["inject"] <= 4
    assert content["inject"] < content["select"] <= 6
    assert content["stop"] == 29  # values of this model never recover
    assert similarity[0] > 0.9999
    assert similarity[1] > 0.995
    assert min(similarity) > 0.7
    assert all(value > 0.5 for value in content["curves"]["rank_correlation"][3:])
    assert output.with_suffix(".png").is_file()
