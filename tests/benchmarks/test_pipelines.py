"""The recurring pipelines, their recorded outputs, and what their loader refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipelines
import pytest

TEXTS = Path(pipelines.__file__).with_name("pipelines.json")
OUTPUTS = TEXTS.with_name("pipeline_outputs.json")


def entry() -> dict[str, Any]:
    return {
        "id": "one",
        "producer": {"system": "You write.", "user_template": "Do this: {task}"},
        "consumer": {
            "system": "You read.",
            "user_template": "{title}: {output} And now: {question}",
        },
        "tasks": [
            {
                "id": "a",
                "title": "Title",
                "text": "The code is X7.",
                "question": "Which code?",
                "answer": "X7",
            }
        ],
    }


def load(tmp_path: Path, entries: object) -> list[pipelines.Pipeline]:
    path = tmp_path / "pipelines.json"
    path.write_text(json.dumps(entries))
    return pipelines.load_pipelines(path)


def test_there_are_eight_pipelines_of_fourteen_different_tasks() -> None:
    loaded = pipelines.load_pipelines(TEXTS)
    assert [len(pipeline.tasks) for pipeline in loaded] == [14] * 8
    texts = [task.text for pipeline in loaded for task in pipeline.tasks]
    assert len(set(texts)) == len(texts)
    roles = [agent.system for p in loaded for agent in (p.producer, p.consumer)]
    assert len(set(roles)) == len(roles)


def test_two_pipelines_ask_for_a_fact_that_only_the_output_carries() -> None:
    asking = [
        pipeline
        for pipeline in pipelines.load_pipelines(TEXTS)
        if all(task.answer for task in pipeline.tasks)
    ]
    assert len(asking) == 2
    for pipeline in asking:
        for task in pipeline.tasks:
            assert task.answer is not None
            prompt = pipeline.consumer.system + pipeline.consumer_user(task, "")
            assert task.answer not in prompt


def test_the_outputs_stand_at_different_places_of_the_consumers_prompts() -> None:
    offsets = {p.consumer.user_template.index("{output}") for p in pipelines.load_pipelines(TEXTS)}
    assert len(offsets) == 8
    assert min(offsets) == 0


def test_every_task_has_a_recorded_output() -> None:
    loaded = pipelines.load_pipelines(TEXTS)
    outputs = pipelines.load_outputs(OUTPUTS, loaded)
    texts = [outputs[p.id][task.id] for p in loaded for task in p.tasks]
    assert len(set(texts)) == len(texts)
    assert min(len(text) for text in texts) > 100
    with_answer = [
        task.answer in outputs[p.id][task.id] for p in loaded for task in p.tasks if task.answer
    ]
    assert sum(with_answer) >= 0.75 * len(with_answer)


def test_a_missing_output_is_named(tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(json.dumps({"one": {}}))
    with pytest.raises(ValueError, match="no output for one/a"):
        pipelines.load_outputs(path, load(tmp_path, [entry()]))


def test_braces_in_an_output_mean_nothing(tmp_path: Path) -> None:
    (pipeline,) = load(tmp_path, [entry()])
    user = pipeline.consumer_user(pipeline.tasks[0], "{title} {question}")
    assert user == "Title: {title} {question} And now: Which code?"


def same_role(pipeline: dict[str, Any]) -> None:
    pipeline["consumer"]["system"] = pipeline["producer"]["system"]


def no_output(pipeline: dict[str, Any]) -> None:
    pipeline["consumer"]["user_template"] = "Nothing is quoted. {question}"


def producer_sees_output(pipeline: dict[str, Any]) -> None:
    pipeline["producer"]["user_template"] += " {output}"


def told_answer(pipeline: dict[str, Any]) -> None:
    pipeline["tasks"][0]["title"] = "About X7"


def answer_from_nowhere(pipeline: dict[str, Any]) -> None:
    pipeline["tasks"][0]["answer"] = "Y8"


def missing_question(pipeline: dict[str, Any]) -> None:
    del pipeline["tasks"][0]["question"]


def repeated_task(pipeline: dict[str, Any]) -> None:
    pipeline["tasks"] *= 2


def no_tasks(pipeline: dict[str, Any]) -> None:
    pipeline["tasks"] = []


def empty_role(pipeline: dict[str, Any]) -> None:
    pipeline["producer"]["system"] = " "


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (same_role, "role prompts of their own"),
        (no_output, "consumer: {output} must stand in the template once"),
        (producer_sees_output, "only task can be filled in"),
        (told_answer, "task 'a': the consumer is told the answer"),
        (answer_from_nowhere, "task 'a': the answer is not in its text"),
        (missing_question, "exactly the fields id, title, text, question, answer"),
        (repeated_task, "task 'a' occurs twice"),
        (no_tasks, "tasks are expected"),
        (empty_role, "producer: system: text is expected"),
    ],
)
def test_a_malformed_pipeline_is_refused_by_name(
    spoil: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    bad = entry()
    spoil(bad)
    with pytest.raises(ValueError, match=message) as failure:
        load(tmp_path, [bad])
    assert "pipeline 'one'" in str(failure.value)


def test_ids_are_unique_and_the_file_is_a_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'one' occurs twice"):
        load(tmp_path, [entry(), entry()])
    with pytest.raises(ValueError, match="a list is expected"):
        load(tmp_path, entry())
