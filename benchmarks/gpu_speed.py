"""Section of the GPU check: prefill and decode rates of the whole engine."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from dataclasses import dataclass, replace

from gpu_engines import Engine, build, served
from gpu_machine import Machine
from gpu_report import Recorder, table
from model_shapes import ModelShape
from paper_setups import Piece
from phase_costs import Accelerator, decode, floor_s, prefill, total
from random_model import CoreSizes, random_ids, random_model, request, serve

from relaykv.engine.core import EngineCore
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.policy import Policy
from relaykv.engine.prefill_plan import SpanKind
from relaykv.engine.request import FinishReason

_BLOCK_SIZE = 16
_MS = 1e3
_KV_SHARE = 0.7  # of the memory that the weights leave; activations and graphs take some too
_FULL = Policy("full", relays=False)


@dataclass(frozen=True, slots=True)
class Load:
    """What the rates are measured at; lengths are tokens."""

    batches: tuple[int, ...]
    context: int  # of every decoding request when it begins to decode
    num_steps: int
    prompts: tuple[int, ...]


def load(dry: bool) -> Load:
    if dry:
        return Load((1, 4), 64, 6, (64, 128))
    return Load((1, 8, 32, 64, 128), 1024, 48, (1024, 4096, 8192))


def measure_rates(
    machine: Machine, recorder: Recorder, shape: ModelShape, accelerator: Accelerator
) -> None:
    """Prefill by prompt length, then decoding by batch size, both over their floors."""
    what = load(machine.dry)
    model = random_model(shape, machine.dtype, machine.device, machine.kernels())
    _measure_prefill(machine, recorder, model, shape, accelerator, what)
    _measure_decode(machine, recorder, model, shape, accelerator, what)


def _measure_prefill(
    machine: Machine,
    recorder: Recorder,
    model: DecoderModel,
    shape: ModelShape,
    accelerator: Accelerator,
    what: Load,
) -> None:
    longest = what.prompts[-1] + 1
    sizes = CoreSizes(longest, 2 * longest, longest)
    core = build(machine, model, shape, served(machine, ()), sizes)
    rows: list[tuple[str, ...]] = [("prefill of", "ms", "TFLOP/s", "of the peak", "over floor")]
    for length in recorder.each((f"prefill of {n}", n) for n in what.prompts):
        costs = prefill(shape.config, [Piece(SpanKind.COMPUTE, length)], _FULL)
        times = []
        for index in range(4):
            prompt = random_ids(f"prefill {length} {index}", length, shape.config.vocab_size)
            machine.wait()
            started = time.perf_counter()
            serve(core, request(f"{length} {index}", prompt, 1))
            times.append(time.perf_counter() - started)
        seconds = statistics.median(times[1:])
        rate = total(costs).operations / seconds
        entry = {
            "tokens": length,
            "median_ms": seconds * _MS,
            "operations_per_s": rate,
            "of_peak": rate / accelerator.operations_per_s,
            "over_floor": seconds / floor_s(costs, accelerator),
        }
        recorder.append("prefill", entry)
        rows.append(
            (
                str(length),
                f"{seconds * _MS:.2f}",
                f"{rate / 1e12:.2f}",
                f"{100 * entry['of_peak']:.0f} %",
                f"{entry['over_floor']:.2f}",
            )
        )
    recorder.say(table(rows))


def _measure_decode(
    machine: Machine,
    recorder: Recorder,
    model: DecoderModel,
    shape: ModelShape,
    accelerator: Accelerator,
    what: Load,
) -> None:
    length = what.context + what.num_steps + _BLOCK_SIZE
    per_request = length * KVCache.bytes_per_token(shape.config, machine.dtype)
    room = _KV_SHARE * machine.memory_bytes() / per_request
    batches = tuple(batch for batch in what.batches if batch <= room)
    if len(batches) < len(what.batches):
        recorder.say(f"no room for batches above {batches[-1]}")
    sizes = CoreSizes(length, batches[-1] * length, 16384, batches[-1])
    as_served = served(machine, batches)
    without = Engine("eager", replace(as_served.device, graph_sizes=()))
    rows: list[tuple[str, ...]] = [
        ("decode", "batch", "ms a step", "tokens/s", "floor ms", "over floor")
    ]
    for engine in (as_served, without):
        core = build(machine, model, shape, engine, sizes)
        work = [(f"decode, {engine.name}, batch {b}", b) for b in batches]
        for batch in recorder.each(work):
            seconds = _step_s(core, shape, what, f"{engine.name} {batch}", batch)
            costs = decode(shape.config, batch, what.context + what.num_steps // 2)
            floor = floor_s(costs, accelerator)
            entry = {
                "engine": engine.name,
                "graphs": bool(engine.device.graph_sizes),
                "batch": batch,
                "context": what.context,
                "median_ms": seconds * _MS,
                "tokens_per_s": batch / seconds,
                "floor_ms": floor * _MS,
                "over_floor": seconds / floor,
            }
            recorder.append("decode", entry)
            rows.append(
                (
                    engine.name,
                    str(batch),
                    f"{seconds * _MS:.2f}",
                    f"{batch / seconds:.0f}",
                    f"{floor * _MS:.2f}",
                    f"{seconds / floor:.2f}",
                )
            )
        del core
        gc.collect()
    recorder.say(table(rows))
    recorder.say(
        f"{shape.name}, context {what.context} and more, whole steps of the engine;\n"
        f"eager: without graphs; floors of {accelerator.name}, where decoding is bound by memory"
    )


def _step_s(core: EngineCore, shape: ModelShape, what: Load, name: str, batch: int) -> float:
    """Median seconds of a step in which every request decodes."""
    for index in range(batch):
        item = f"{name} {index}"
        prompt = random_ids(item, what.context, shape.config.vocab_size)
        core.add(request(item, prompt, what.num_steps))
    ends = []
    while core.has_work:
        outputs = core.step()
        if any(output.finish_reason is FinishReason.ERROR for output in outputs):
            raise RuntimeError(f"decoding at batch {batch} failed")
        if sum(len(output.token_ids) for output in outputs) == batch:
            ends.append(time.perf_counter())
    # The first steps still belong to the prefill.
    steps = [end - start for start, end in itertools.pairwise(ends)][what.num_steps // 4 :]
    return statistics.median(steps)
