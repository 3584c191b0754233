"""Section of the GPU check: the whole engine, greedy, on every way to run its steps.

Hand-offs of every policy are served together, so decodes, dense chunks and scattered rows meet in
one batch. What a producer wrote stands in its prompt, so that every engine relays the same text.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpu_machine import Machine, torch_attention
from gpu_report import Recorder, table
from model_shapes import ModelShape, llama_8b, qwen3_06b, toy_llama, toy_qwen3
from random_model import CoreSizes, core_parts, random_ids, random_model, request, serve

from relaykv.engine.assembly import build_core
from relaykv.engine.config import DeviceConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.device import device_config
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Policy
from relaykv.engine.request import RelayOptions, RequestOutput
from relaykv.kernels.kernel_set import torch_kernels

POLICIES = ("full", "shift", "epic", "cacheblend", "relay")
# Two tokens this close, in nats, may change places by rounding alone.
_CLOSE = 0.05
# The large shape keeps this many layers here: what matters is the shape of one.
_NUM_LAYERS = 6


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to run the same model."""

    name: str
    device: DeviceConfig
    plain_torch: bool = False  # torch's kernels and attention, on the same device


@dataclass(frozen=True, slots=True)
class _Sizes:
    text: int  # tokens that a producer wrote
    role: int
    answer: int
    num_handoffs: int  # per policy


def check_engines(machine: Machine, recorder: Recorder) -> None:
    """Runs the reference first, then every other engine against it."""
    shapes = (toy_qwen3(), toy_llama()) if machine.dry else (qwen3_06b(), _shallow(llama_8b()))
    rows: list[tuple[str, ...]] = [("model", "engine", "answers", "equal", "largest difference")]
    for shape in recorder.each((shape.name, shape) for shape in shapes):
        model = random_model(shape, machine.dtype, machine.device, machine.kernels())
        wanted = _answers(machine, model, shape, _reference(machine))
        work = [(f"{shape.name}: {engine.name}", engine) for engine in engines(machine)]
        for engine in recorder.each(work):
            rows.append(_check(machine, recorder, model, shape, engine, wanted))
        del model
        gc.collect()
    recorder.say(table(rows))
    recorder.say("largest difference: of a chosen token's log-probability, up to where tokens part")


def engines(machine: Machine) -> list[Engine]:
    """What is compared with the reference."""
    # Influence is counted as rarely as a GPU does it.
    eager = DeviceConfig(influence_layer_stride=4, influence_step_stride=2)
    overlapped = Engine("overlap", replace(eager, overlap=True))
    if machine.dry:
        return [Engine("eager", eager), overlapped]
    graphs = replace(eager, graph_sizes=(1, 2, 4, 8, 16))
    return [
        Engine("eager", eager),
        Engine("graphs", graphs),
        overlapped,
        Engine("graphs and overlap", replace(graphs, overlap=True)),
        Engine("stock module", replace(eager, stock_attention=True)),
        Engine("deterministic", replace(eager, deterministic=True)),
    ]


def served(machine: Machine, graph_sizes: tuple[int, ...]) -> Engine:
    """The engine as `relaykv serve` runs it, with graphs of the sizes that will be needed."""
    device = device_config(EngineOptions(), machine.device)
    if not machine.dry:
        device = replace(device, graph_sizes=graph_sizes)
    return Engine("served", device)


def build(
    machine: Machine,
    model: DecoderModel,
    shape: ModelShape,
    engine: Engine,
    sizes: CoreSizes,
    policies: tuple[Policy, ...] = (),
) -> EngineCore:
    """An engine around the model; the weights are shared."""
    if engine.plain_torch:
        model = copy.copy(model)
        model.kernels = torch_kernels()
    config = shape.config
    attention = None
    if engine.plain_torch:
        attention = torch_attention(
            config.num_heads, config.num_kv_heads, config.head_dim, machine.dtype, machine.device
        )
    return build_core(core_parts(model, shape, sizes, engine.device, policies), attention)


def _reference(machine: Machine) -> Engine:
    eager = engines(machine)[0]
    return Engine("plain torch", eager.device, plain_torch=True)


def _check(
    machine: Machine,
    recorder: Recorder,
    model: DecoderModel,
    shape: ModelShape,
    engine: Engine,
    wanted: Mapping[str, list[RequestOutput]],
) -> tuple[str, ...]:
    try:
        found = _answers(machine, model, shape, engine)
    except Exception as error:
        recorder.problem(f"{shape.name}, {engine.name}: {type(error).__name__}: {error}")
        machine.check_alive()
        return (shape.name, engine.name, "0", "0", "-")
    num_equal, largest = 0, 0.0
    for name, outputs in found.items():
        comparison = compare(wanted[name], outputs)
        num_equal += comparison.part is None
        largest = max(largest, comparison.largest)
        where = f"{shape.name}, {engine.name}, {name}"
        selected = [_num_recomputed(answer) for answer in (wanted[name], outputs)]
        # A threshold that rounding crosses is a difference of its own.
        note = "" if selected[0] == selected[1] else f"; it recomputed {selected} tokens"
        if comparison.part is not None and comparison.gap >= _CLOSE:
            recorder.problem(
                f"{where}: token {comparison.part} differs where the best two are "
                f"{comparison.gap:.3f} nats apart{note}"
            )
        if comparison.largest >= _CLOSE:
            recorder.problem(
                f"{where}: a log-probability differs by {comparison.largest:.3f}{note}"
            )
    entry: dict[str, Any] = {
        "model": shape.name,
        "engine": engine.name,
        "answers": len(found),
        "equal": num_equal,
        "largest_logprob_difference": largest,
    }
    recorder.append("engines", entry)
    return (shape.name, engine.name, str(len(found)), str(num_equal), f"{largest:.4f}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of two greedy answers to one prompt."""

    part: int | None  # index of the first token that differs
    gap: float  # between the reference's best two tokens there
    largest: float  # difference of a chosen token's log-probability before that


def compare(wanted: list[RequestOutput], found: list[RequestOutput]) -> Comparison:
    largest = 0.0
    for index, (one, other) in enumerate(zip(_logprobs(wanted), _logprobs(found), strict=True)):
        if one.token_id != other.token_id:
            return Comparison(index, one.top[0][1] - one.top[1][1], largest)
        largest = max(largest, abs(one.logprob - other.logprob))
    return Comparison(None, 0.0, largest)


def _logprobs(outputs: list[RequestOutput]) -> Iterator[Any]:
    for output in outputs:
        yield from output.logprobs


def _num_recomputed(outputs: list[RequestOutput]) -> int:
    report = outputs[-1].relay
    return 0 if report is None else report.num_recomputed_tokens


def _answers(
    machine: Machine, model: DecoderModel, shape: ModelShape, engine: Engine
) -> dict[str, list[RequestOutput]]:
    """Hand-offs of every policy: the producers first, then all consumers at once."""
    sizes = _Sizes(48, 32, 6, 1) if machine.dry else _Sizes(300, 100, 24, 3)
    num_handoffs = sizes.num_handoffs * len(POLICIES)
    length = 2 * (sizes.text + sizes.role + sizes.answer)
    limits = CoreSizes(
        max_model_len=length,
        num_kv_tokens=4 * length * num_handoffs,
        max_num_batched_tokens=max(length, 512),  # several steps, so chunks meet decodes
        max_num_requests=16,
    )
    core = build(machine, model, shape, engine, limits)

    def ids(name: str, count: int) -> list[int]:
        return random_ids(name, count, shape.config.vocab_size)

    producers, consumers = [], []
    for index in range(num_handoffs):
        policy = POLICIES[index % len(POLICIES)]
        name = f"{policy} {index}"
        text = ids(f"text {index}", sizes.text)
        relay = RelayOptions(session=name, policy=policy)
        prompt = [*ids(f"producer {index}", sizes.role), *text]
        producers.append(request(f"producer of {name}", prompt, 4, relay))
        prompt = [*ids(f"consumer {index}", sizes.role + 5), *text, *ids(f"end {index}", 11)]
        consumers.append(request(name, prompt, sizes.answer, relay, num_logprobs=2))
    serve(core, *producers)
    return serve(core, *consumers)


def _shallow(shape: ModelShape) -> ModelShape:
    config = replace(shape.config, num_layers=_NUM_LAYERS)
    bands = replace(shape.bands, stop=min(shape.bands.stop, _NUM_LAYERS - 2))
    return ModelShape(f"{shape.name} ({_NUM_LAYERS} layers)", config, bands)
