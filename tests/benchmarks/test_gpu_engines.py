from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_engines
import pytest
import torch
from gpu_engines import check_engines, compare
from gpu_machine import Machine
from gpu_report import Budget, Recorder, SectionResult
from torch import Tensor

from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.request import RequestOutput, TokenLogprob, Usage
from relaykv.kernels.shift_copy import shift_copy

MACHINE = Machine(torch.device("cpu"), torch.bfloat16)


def answer(*steps: tuple[int, float, float]) -> list[RequestOutput]:
    """Tokens with their log-probability and the distance to the second best."""
    return [
        RequestOutput(
            "r", "", (token,), Usage(1, 1, 0),
            (TokenLogprob(token, logprob, ((token, logprob), (99, logprob - gap))),),
        )
        for token, logprob, gap in steps
    ]  # fmt: skip


def test_equal_answers_differ_by_their_log_probabilities_alone() -> None:
    found = compare(answer((1, -1.0, 0.5), (2, -2.0, 0.5)), answer((1, -1.01, 0.5), (2, -1.7, 0.5)))
    assert (found.part, found.gap) == (None, 0.0)
    assert found.largest == pytest.approx(0.3)


def test_answers_that_part_tell_how_close_it_was_and_are_not_followed_further() -> None:
    wanted = answer((1, -1.0, 0.5), (2, -2.0, 0.03), (3, -1.0, 0.5))
    found = compare(wanted, answer((1, -1.0, 0.5), (4, -2.0, 0.01), (5, -9.0, 0.5)))
    assert (found.part, found.largest) == (1, 0.0)
    assert found.gap == pytest.approx(0.03)


def check(tmp_path: Path) -> dict[str, Any]:
    result = SectionResult("engines", tmp_path / "engines.json")
    check_engines(MACHINE, Recorder(result, Budget(60), lambda _: None))
    result.save()
    values: dict[str, Any] = json.loads(result.path.read_text())
    return values


def test_a_model_that_answers_differently_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = gpu_engines.build

    def unturned(
        k: Tensor,
        v: Tensor,
        hidden: Tensor,
        influence: Tensor,
        source: Tensor,
        target: Tensor,
        segment: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """Relayed keys stay turned for their old positions."""
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        shift_copy(k, v, hidden, influence, source, target, segment, cos, sin)

    def wrong(machine: Machine, model: DecoderModel, *args: Any) -> Any:
        if not args[1].plain_torch:
            model = copy.copy(model)
            model.kernels = replace(model.kernels, shift_copy=unturned)
        return build(machine, model, *args)

    monkeypatch.setattr(gpu_engines, "build", wrong)
    values = check(tmp_path)
    wrong_policies = {text.split(", ")[2].split()[0] for text in values["problems"]}
    assert "shift" in wrong_policies
    assert "full" not in wrong_policies


def test_an_engine_that_breaks_is_a_problem_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = gpu_engines.build

    def broken(machine: Machine, model: DecoderModel, *args: Any) -> Any:
        if args[1].name == "eager":
            raise MemoryError("no room")
        return build(machine, model, *args)

    monkeypatch.setattr(gpu_engines, "build", broken)
    values = check(tmp_path)
    assert values["problems"] == [
        f"{model}, eager: MemoryError: no room" for model in ("toy Qwen3", "toy Llama")
    ]
    assert [entry["engine"] for entry in values["data"]["engines"]] == ["overlap"] * 2
