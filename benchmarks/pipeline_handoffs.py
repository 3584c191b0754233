"""Writes the tasks of `pipelines.json` as hand-offs for `relaykv fidelity`.

The first tasks of every pipeline become `lessons.jsonl`, to learn from; the others `tasks.jsonl`,
to measure on. In `crossed.jsonl` every reader reads what another pipeline's writer wrote, of which
nothing was learned. The producers' outputs are those recorded in `pipeline_outputs.json`.

    python benchmarks/pipeline_handoffs.py --output benchmarks/out
    relaykv fidelity --learn benchmarks/out/lessons.jsonl --handoffs benchmarks/out/tasks.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines import Pipeline, Task, load_outputs, load_pipelines

_FOLDER = Path(__file__).parent


def handoff(pipeline: Pipeline, task: Task, output: str) -> dict[str, Any]:
    """One line of a file of hand-offs."""
    producer = {
        "system": pipeline.producer.system,
        "user": pipeline.producer_user(task),
        "output": output,
    }
    template = pipeline.consumer_user(task, "{output_1}")
    line: dict[str, Any] = {
        "id": f"{pipeline.id}/{task.id}",
        "domain": pipeline.id,
        "producers": [producer],
        "consumer": {"system": pipeline.consumer.system, "user_template": template},
    }
    if task.answer is not None:
        line["answer"] = task.answer
    return line


def split(
    pipelines: Sequence[Pipeline], outputs: Mapping[str, Mapping[str, str]], num_lessons: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Hand-offs to learn from and to measure on, pipelines taking turns in both."""
    numbered = [
        (index, handoff(pipeline, task, outputs[pipeline.id][task.id]))
        for pipeline in pipelines
        for index, task in enumerate(pipeline.tasks)
    ]
    ordered = sorted(numbered, key=lambda pair: pair[0])  # stable, so pipelines stay in order
    lessons = [line for index, line in ordered if index < num_lessons]
    tasks = [line for index, line in ordered if index >= num_lessons]
    return lessons, tasks


def crossed(
    pipelines: Sequence[Pipeline], outputs: Mapping[str, Mapping[str, str]], num_lessons: int
) -> list[dict[str, Any]]:
    """The first two tasks that are measured on, each read by the next pipeline's reader."""
    lines = []
    for place, pipeline in enumerate(pipelines):
        reading = pipelines[(place + 1) % len(pipelines)]
        for index in range(num_lessons, num_lessons + 2):
            task = pipeline.tasks[index]
            line = handoff(pipeline, task, outputs[pipeline.id][task.id])
            asked = handoff(reading, reading.tasks[index], "")
            line["id"] = f"{pipeline.id}/{task.id} to {reading.id}"
            line["consumer"] = asked["consumer"]
            line.pop("answer", None)
            lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=_FOLDER / "out", metavar="DIR")
    parser.add_argument(
        "--lessons", type=int, default=6, metavar="COUNT", help="of every pipeline's 14 tasks"
    )
    parser.add_argument(
        "--no-answers", action="store_true", help="measure distributions only, which is faster"
    )
    parser.add_argument("--only", action="append", metavar="ID", help="take this pipeline only")
    arguments = parser.parse_args()
    pipelines = load_pipelines(_FOLDER / "pipelines.json")
    outputs = load_outputs(_FOLDER / "pipeline_outputs.json", pipelines)
    wanted = [p for p in pipelines if arguments.only is None or p.id in arguments.only]
    lessons, tasks = split(wanted, outputs, arguments.lessons)
    arguments.output.mkdir(parents=True, exist_ok=True)
    files = {
        "lessons.jsonl": lessons,
        "tasks.jsonl": tasks,
        "crossed.jsonl": crossed(wanted, outputs, arguments.lessons),
    }
    for name, lines in files.items():
        for line in lines:
            if arguments.no_answers:
                line.pop("answer", None)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (arguments.output / name).write_text(text, encoding="utf-8")
        print(f"{len(lines)} hand-offs  {arguments.output / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
