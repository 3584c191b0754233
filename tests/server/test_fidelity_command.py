"""`relaykv fidelity` from its arguments to its files, on a tiny random model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from fake_engine import ChatMlTemplate
from planted_model import planted_handoffs
from readable_model import readable_parts

from relaykv.engine import assembly, fidelity
from relaykv.engine.assembly import EngineParts
from relaykv.engine.options import EngineOptions
from relaykv.server import fidelity_command
from relaykv.server.chat_template import HuggingFaceTemplate
from relaykv.server.cli import build_parser, main


@pytest.fixture
def handoffs(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    own = planted_handoffs(3)
    own[0] = replace(own[0], answer="never written")
    path.write_text("\n".join(json.dumps(asdict(handoff)) for handoff in own), encoding="utf-8")
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[EngineOptions]:
    """What the command has asked the engine for; it gets a tiny random model."""
    options: list[EngineOptions] = []

    def prepare(wanted: EngineOptions) -> EngineParts:
        options.append(wanted)
        return readable_parts()

    monkeypatch.setattr(assembly, "prepare", prepare)
    template = classmethod(lambda _class, _folder: ChatMlTemplate())
    monkeypatch.setattr(HuggingFaceTemplate, "from_folder", template)
    return options


def command(handoffs: Path, output: Path, *more: str) -> list[str]:
    lengths = ["--tokens", "64", "--answer-tokens", "8", "--greedy-tokens", "12"]
    return ["fidelity", "--handoffs", str(handoffs), *lengths, "--output", str(output), *more]


def test_scores_a_table_and_a_picture_are_written(
    asked: list[EngineOptions], handoffs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    more = ["--policies", "shift,epic", "--bands", "0,1,2", "--threads", "1"]

    assert main(command(handoffs, output, *more)) == 0

    content = json.loads((output / "handoffs.json").read_text(encoding="utf-8"))
    assert content["subject"] == {
        "model": "planted",
        "fingerprint": "planted",
        "dtype": "float32",
        "command": "relaykv fidelity --model default --handoffs own.jsonl --policies shift,epic "
        "--bands 0,1,2 --tokens 64 --answer-tokens 8 --greedy-tokens 12 --device auto --dtype auto",
    }
    assert [summary["policy"] for summary in content["summaries"]] == [
        "shift",
        "epic",
        "relay 0,1,2",
    ]
    assert len(content["scores"]) == 3 * 3
    assert content["full"] == {"num_asked": 0, "num_right": 0}  # no producer wrote the answer
    printed = capsys.readouterr()
    table = (output / "handoffs.md").read_text(encoding="utf-8")
    assert table in printed.out
    assert table.count("\n| `") == 4
    assert (output / "handoffs.png").read_bytes().startswith(b"\x89PNG")
    assert "3 cases are few" in printed.err
    assert "3.0 of 3 hand-offs" in printed.err
    (options,) = asked
    assert (options.deterministic, options.overlap, options.cuda_graphs) == (True, False, False)
    assert options.num_threads == 1


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("test", "more", "unit", "picture"),
    [
        ("chain", ["--answer-tokens", "8"], "chains", True),
        ("judge", [], "trials", False),
        ("flip", [], "trials", False),
    ],
)
def test_other_tests_write_their_own_files(
    test: str,
    more: list[str],
    unit: str,
    picture: bool,
    own_files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    arguments = ["--test", test, "--handoffs", str(own_files[test]), "--tokens", "64", *more]

    status = main(["fidelity", *arguments, "--policies", "shift,epic", "--output", str(output)])

    printed = capsys.readouterr()
    assert status == 0, printed.err
    names = {f"{test}.json", f"{test}.md", *([f"{test}.png"] if picture else [])}
    assert {path.name for path in output.iterdir()} == names
    content = json.loads((output / f"{test}.json").read_text(encoding="utf-8"))
    assert content["subject"]["command"] == (
        f"relaykv fidelity --model default --test {test} --handoffs {test}.jsonl "
        f"--policies shift,epic --tokens 64 {' '.join([*more, ''])}--device auto --dtype auto"
    )
    assert {"shift", "epic"} <= {_policy(score) for score in content["scores"]}
    assert (output / f"{test}.md").read_text(encoding="utf-8") in printed.out
    assert f"2.0 of 2 {unit}" in printed.err


def _policy(score: dict[str, Any]) -> str:
    policy = score["score"]["policy"] if "score" in score else score["policy"]
    assert isinstance(policy, str)
    return policy


@pytest.fixture
def own_files(tmp_path: Path) -> dict[str, Path]:
    """Two cases for each of the other tests."""
    with_two = [asdict(h) for h in planted_handoffs(6) if h.producers[1:]]
    for entry in with_two:
        del entry["answer"]
    agents = [
        {"system": f"role {letter}", "user_template": f"words of {letter} {text} and more words"}
        for letter, text in (("a", ""), ("b", "{text}"), ("c", "{text}"))
    ]
    lines = {
        "chain": [{"id": name, "agents": agents} for name in ("one", "two")],
        "judge": [{**entry, "choices": ["A", "B"]} for entry in with_two],
        "flip": [{**entry, "choices": ["A", "B"], "turned": "other"} for entry in with_two],
    }
    paths = {}
    for name, entries in lines.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        text = "\n".join(json.dumps(entry) for entry in entries)
        paths[name].write_text(text, encoding="utf-8")
    return paths


@pytest.mark.usefixtures("asked")
def test_two_runs_write_the_same_bytes(handoffs: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        assert main(command(handoffs, folder, "--policies", "shift", "--limit", "2")) == 0
    for name in ("handoffs.json", "handoffs.md"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


@pytest.mark.usefixtures("asked")
def test_without_matplotlib_there_are_scores_and_a_word_about_the_picture(
    handoffs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fidelity_command, "can_draw", lambda: False)

    assert main(command(handoffs, tmp_path / "out", "--policies", "shift", "--limit", "1")) == 0

    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["handoffs.json", "handoffs.md"]
    printed = capsys.readouterr()
    assert "pip install 'relaykv[profile]'" in printed.err
    assert "picture" not in printed.out


@pytest.mark.usefixtures("asked")
def test_an_interrupted_run_writes_nothing_and_says_so_by_its_exit_code(
    handoffs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fidelity, "kl_divergence", interrupt)

    assert main(command(handoffs, tmp_path / "out")) == 130
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--handoffs", "none.jsonl"], "cannot read none.jsonl"),
        (["--policies", "magic"], "unknown policy 'magic'; known: full, shift"),
        (["--bands", "0,1,3"], "layer 3 is past the model's last one"),
        (["--answer-tokens", "20"], "--answer-tokens cannot be more than --greedy-tokens"),
        (["--tokens", "900"], "hand-off 'handoff 0' may need"),
        (["--test", "judge", "--learn", "a.jsonl"], "--learn is for --test handoffs alone"),
        (["--learn", "none.jsonl"], "cannot read none.jsonl"),
    ],
)
def test_failures_are_told_in_one_line(
    more: list[str],
    reason: str,
    handoffs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(handoffs, tmp_path / "out", *more)) == 1

    line = capsys.readouterr().err
    assert line.startswith("relaykv: error: ")
    assert reason in line
    assert line.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "47"],
        ["--policies", "shift,,epic"],
        ["--bands", "1,2"],
        ["--bands", "3,2,1"],
        ["--limit", "0"],
        ["--test", "guess"],
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["fidelity", *arguments])
    assert exited.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_help_names_every_argument() -> None:
    parser = build_parser()
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    text = commands.choices["fidelity"].format_help()
    for name in (
        "--test",
        "--model",
        "--handoffs",
        "--policies",
        "--bands",
        "--answer-tokens",
        "--output",
    ):
        assert name in text
