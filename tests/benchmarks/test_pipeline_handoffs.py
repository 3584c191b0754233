from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from pipeline_handoffs import crossed, split
from pipelines import load_outputs, load_pipelines

from relaykv.engine.handoff import parse_handoff, read_handoffs

_FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_task_is_in_one_of_the_two_files_and_can_be_read(tmp_path: Path) -> None:
    pipelines = load_pipelines(_FOLDER / "pipelines.json")
    outputs = load_outputs(_FOLDER / "pipeline_outputs.json", pipelines)
    lessons, tasks = split(pipelines, outputs, 6)
    assert len(lessons) == 48
    assert len(tasks) == 64
    assert not {line["id"] for line in lessons} & {line["id"] for line in tasks}
    assert set(Counter(line["domain"] for line in tasks).values()) == {8}
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in tasks), encoding="utf-8")
    for handoff, line in zip(read_handoffs(path), tasks, strict=True):
        pipeline, _, task = handoff.id.partition("/")
        output = outputs[pipeline][task]
        assert handoff.producers[0].output == output
        expected = next(p for p in pipelines if p.id == pipeline)
        found = next(t for t in expected.tasks if t.id == task)
        assert handoff.consumer.user([output]) == expected.consumer_user(found, output)
        assert parse_handoff(line).answer == found.answer


def test_crossed_handoffs_are_read_in_another_pipelines_role() -> None:
    pipelines = load_pipelines(_FOLDER / "pipelines.json")
    outputs = load_outputs(_FOLDER / "pipeline_outputs.json", pipelines)
    lines = crossed(pipelines, outputs, 6)
    assert len(lines) == 16
    for line in lines:
        read = parse_handoff(line)
        reader = next(p for p in pipelines if p.consumer.system == read.consumer.system)
        assert reader.producer.system != read.producers[0].system
        assert read.id.endswith(f" to {reader.id}")
