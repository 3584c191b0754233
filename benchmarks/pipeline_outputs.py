"""Writes what the producers of `pipelines.json` answer: `pipeline_outputs.json`.

Every third task is decoded greedily, the others at temperature 0.7 with a fixed seed, so that the
outputs are as varied as an agent's. A try that ends early, or that lacks the fact for which the
consumer will be asked, is followed by one with the next seed; the best try is kept.

    python benchmarks/pipeline_outputs.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines import Pipeline, Task, load_pipelines

from relaykv.engine.assembly import build_core, prepare
from relaykv.engine.options import EngineOptions
from relaykv.engine.producers import serve
from relaykv.engine.request import GenerateRequest, RequestOutput, SamplingParams
from relaykv.server.chat_template import HuggingFaceTemplate

_FOLDER = Path(__file__).parent
_MAX_TOKENS = (140, 200, 260, 320, 380)  # by turns, so that the lengths differ
_MIN_TOKENS = 100
_MAX_TRIES = 4


@dataclass(frozen=True, slots=True)
class Try:
    """One output of a producer."""

    text: str
    num_tokens: int
    has_answer: bool

    @property
    def is_usable(self) -> bool:
        return self.has_answer and self.num_tokens >= _MIN_TOKENS

    @property
    def rank(self) -> tuple[bool, bool, int]:
        return (self.num_tokens >= _MIN_TOKENS, self.has_answer, self.num_tokens)


class Producers:
    """Lets the producers of pipelines write, many at a time."""

    def __init__(self, model: str, num_threads: int | None) -> None:
        parts = prepare(EngineOptions(model=model, dtype="float32", num_threads=num_threads))
        self._core = build_core(parts)
        self._tokenizer = parts.tokenizer
        self._template = HuggingFaceTemplate.from_folder(parts.folder)

    def write(self, pipelines: Sequence[Pipeline]) -> dict[str, dict[str, str]]:
        """The best try of every task, by pipeline and task."""
        best: dict[tuple[str, str], Try] = {}
        for attempt in range(_MAX_TRIES):
            requests = {
                (pipeline.id, task.id): self._request(pipeline, index, attempt)
                for pipeline in pipelines
                for index, task in enumerate(pipeline.tasks)
                if (pipeline.id, task.id) not in best or not best[pipeline.id, task.id].is_usable
            }
            print(f"try {attempt + 1}: {len(requests)} outputs", file=sys.stderr)
            written = serve(self._core, list(requests.values()))
            for pipeline in pipelines:
                for task in pipeline.tasks:
                    key = (pipeline.id, task.id)
                    if key in requests:
                        result = _try(task, written[requests[key].request_id])
                        best[key] = max(best.get(key, result), result, key=lambda t: t.rank)
        return {p.id: {task.id: best[p.id, task.id].text for task in p.tasks} for p in pipelines}

    def _request(self, pipeline: Pipeline, index: int, attempt: int) -> GenerateRequest:
        task = pipeline.tasks[index]
        messages = [
            {"role": "system", "content": pipeline.producer.system},
            {"role": "user", "content": pipeline.producer_user(task)},
        ]
        prompt = tuple(self._tokenizer.encode(self._template.render(messages)))
        name = f"{pipeline.id}/{task.id}"
        return GenerateRequest(name, prompt, sampling(index, attempt))


def sampling(index: int, attempt: int) -> SamplingParams:
    """How task number `index` of a pipeline is decoded at a try (from 0)."""
    greedy = index % 3 == 0 and attempt == 0
    return SamplingParams(
        max_tokens=_MAX_TOKENS[index % len(_MAX_TOKENS)],
        temperature=0.0 if greedy else 0.7,
        top_p=0.95,
        seed=1000 * attempt + index,
    )


def _try(task: Task, outputs: Sequence[RequestOutput]) -> Try:
    text = "".join(output.text for output in outputs).strip()
    num_tokens = sum(len(output.token_ids) for output in outputs)
    return Try(text, num_tokens, task.answer is None or task.answer in text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--pipelines", type=Path, default=_FOLDER / "pipelines.json")
    parser.add_argument("--only", action="append", metavar="ID", help="write this pipeline only")
    parser.add_argument("--threads", type=int, help="default: torch decides")
    parser.add_argument("--output", type=Path, default=_FOLDER / "pipeline_outputs.json")
    arguments = parser.parse_args()
    pipelines = load_pipelines(arguments.pipelines)
    wanted = [p for p in pipelines if arguments.only is None or p.id in arguments.only]
    outputs: dict[str, dict[str, str]] = {}
    if len(wanted) < len(pipelines):
        outputs = json.loads(arguments.output.read_text(encoding="utf-8"))
    outputs |= Producers(arguments.model, arguments.threads).write(wanted)
    ordered = {p.id: outputs[p.id] for p in pipelines}
    text = json.dumps(ordered, indent=1, ensure_ascii=False) + "\n"
    arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
