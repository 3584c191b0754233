"""Recurring pipelines: one producer and one consumer that hand on many different tasks.

Unlike `handoffs.jsonl`, where every hand-off is another pair of roles, a pipeline's roles and
templates stay the same from task to task, as an agent program's do. So what a policy learns on
some tasks of a pipeline can be tested on its other tasks. Some pipelines carry a fact that the
consumer can read only in the producer's output: their tasks have a question and its exact answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLACEHOLDER = re.compile(r"\{(task|title|output|question)\}")


@dataclass(frozen=True, slots=True)
class Agent:
    """A role: its system prompt and the user message's template."""

    system: str
    user_template: str

    def user(self, values: Mapping[str, str]) -> str:
        """The user message; braces in the values mean nothing."""
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.user_template)


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a pipeline. `title` is what the consumer knows besides the output."""

    id: str
    title: str
    text: str  # what the producer is asked
    question: str | None = None  # what the consumer is asked, where that changes with the task
    answer: str | None = None  # stands in `text` and nowhere in the consumer's own prompt


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Two roles and the tasks that pass through them."""

    id: str
    producer: Agent
    consumer: Agent
    tasks: tuple[Task, ...]

    def producer_user(self, task: Task) -> str:
        return self.producer.user({"task": task.text})

    def consumer_user(self, task: Task, output: str) -> str:
        """The consumer's user message with the producer's output quoted in it."""
        values = {"title": task.title, "question": task.question or "", "output": output}
        return self.consumer.user(values)


def load_pipelines(path: Path) -> list[Pipeline]:
    """Reads and checks a file of pipelines.

    Raises:
        ValueError: the file is no list of well-formed pipelines; the message names the entry.
        OSError: the file cannot be read.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{path.name}: a list is expected")
    pipelines = [_pipeline(entry, number) for number, entry in enumerate(entries, start=1)]
    _require_distinct([pipeline.id for pipeline in pipelines], f"{path.name}: pipeline")
    return pipelines


def load_outputs(path: Path, pipelines: list[Pipeline]) -> dict[str, dict[str, str]]:
    """The producers' recorded outputs, by pipeline and task.

    Raises:
        ValueError: an output is missing.
        OSError: the file cannot be read.
    """
    outputs: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    for pipeline in pipelines:
        for task in pipeline.tasks:
            if task.id not in outputs.get(pipeline.id, {}):
                raise ValueError(f"{path.name}: no output for {pipeline.id}/{task.id}")
    return outputs


def _pipeline(entry: Any, number: int) -> Pipeline:
    fields = _fields(entry, ("id", "producer", "consumer", "tasks"), f"pipeline {number}")
    pipeline_id = _text(fields["id"], f"pipeline {number}: id")
    where = f"pipeline {pipeline_id!r}"
    producer = _agent(fields["producer"], {"task": 1}, f"{where}: producer")
    consumer = _agent(fields["consumer"], {"output": 1}, f"{where}: consumer")
    if producer.system == consumer.system:
        raise ValueError(f"{where}: producer and consumer need role prompts of their own")
    if not isinstance(fields["tasks"], list) or not fields["tasks"]:
        raise ValueError(f"{where}: tasks are expected")
    asks = "{question}" in consumer.user_template
    tasks = tuple(_task(task, asks, where) for task in fields["tasks"])
    _require_distinct([task.id for task in tasks], f"{where}: task")
    return Pipeline(pipeline_id, producer, consumer, tasks)


def _agent(entry: Any, required: Mapping[str, int], where: str) -> Agent:
    fields = _fields(entry, ("system", "user_template"), where)
    template = _text(fields["user_template"], f"{where}: user_template")
    found = _PLACEHOLDER.findall(template)
    for name, count in required.items():
        if found.count(name) != count:
            raise ValueError(f"{where}: {{{name}}} must stand in the template once")
    allowed = {"task"} if "task" in required else {"output", "title", "question"}
    if not set(found) <= allowed:
        raise ValueError(f"{where}: only {', '.join(sorted(allowed))} can be filled in")
    return Agent(_text(fields["system"], f"{where}: system"), template)


def _task(entry: Any, asks: bool, where: str) -> Task:
    names = ("id", "title", "text", *(("question", "answer") if asks else ()))
    fields = _fields(entry, names, f"{where}: a task")
    values = {name: _text(fields[name], f"{where}: task: {name}") for name in names}
    task = Task(**values)
    if task.answer is not None:
        if task.answer not in task.text:
            raise ValueError(f"{where}: task {task.id!r}: the answer is not in its text")
        if task.answer in task.title + (task.question or ""):
            raise ValueError(f"{where}: task {task.id!r}: the consumer is told the answer")
    return task


def _require_distinct(ids: list[str], where: str) -> None:
    for entry_id in ids:
        if ids.count(entry_id) > 1:
            raise ValueError(f"{where} {entry_id!r} occurs twice")


def _fields(entry: Any, names: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        raise ValueError(f"{where}: exactly the fields {', '.join(names)} are expected")
    return entry


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: text is expected")
    return value
