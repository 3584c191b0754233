"""Measures on hand-offs how a model's relayed KV differs from computed KV, layer by layer.

The model profiled writes the producers' answers itself, with greedy decoding, so the KV compared
is the KV that decoding produced; the consumer's prompt is then computed in full beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relaykv.engine.assembly import EngineParts, build_core
from relaykv.engine.config import CacheConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.handoff import Handoff
from relaykv.engine.kv_comparison import KVDeviation, kv_deviation
from relaykv.engine.layer_curves import Measurement, handoff_curves
from relaykv.engine.recording import Recording, SessionKey
from relaykv.engine.relay_profile import ProfileError
from relaykv.engine.request import GenerateRequest, RelayOptions, SamplingParams

# Producers of one group decode together. The sizes do not depend on the machine, so that two
# runs compute the same.
_GROUP_HANDOFFS = 4
_GROUP_TOKENS = 16_384
# A text may become more tokens when it is read than it had when it was written.
_READ_MORE = 1.5
_READER = "reader"  # the tenant of consumers: nothing but another prompt can be its prefix
_DECODING_SHARE = 0.75  # of the work on a hand-off, for the progress bar
# Cosines that differ from 1 by less are rounding, by the numeric type of the cache.
_ROUNDING = {"float32": 1e-6}
_COARSE_ROUNDING = 1e-4

Prompt = Callable[[str, str], Sequence[int]]  # of a system text, perhaps empty, and a user text


@dataclass(frozen=True, slots=True)
class _Prompts:
    """A hand-off whose producers' prompts are token ids."""

    handoff: Handoff
    producers: tuple[tuple[int, ...], ...]
    max_tokens: int  # of all its requests together
    max_request_tokens: int  # of its longest request


class Profiler:
    """Lets a model hand text on and compares.

    Attributes:
        core: an engine of its own, as small as will do.
    """

    def __init__(
        self, parts: EngineParts, prompt: Prompt, handoffs: Sequence[Handoff], max_tokens: int
    ) -> None:
        """
        Args:
            parts: of the model, whose own cache size is not used.
            prompt: renders and tokenises, as the server would.
            max_tokens: that each producer writes at most.

        Raises:
            ProfileError: a hand-off is too long for the model.
        """
        self._prompt = prompt
        self._max_tokens = max_tokens
        prepared = [self._prepare(h, parts.scheduler.max_model_len) for h in handoffs]
        self._groups = list(_groups(prepared))
        self._min_segment_tokens = parts.relay.min_segment_tokens
        self._inv_freq = parts.model.inv_freq
        dtype = str(parts.model.dtype).removeprefix("torch.")
        self._rounding = _ROUNDING.get(dtype, _COARSE_ROUNDING)
        self.core = _small_core(parts, self._groups)

    def measure(self, on_progress: Callable[[float], None]) -> Iterator[Measurement]:
        """Works through the hand-offs; those that relay nothing give no measurement.

        Args:
            on_progress: is told of every further piece of work, in hand-offs.
        """
        for group in self._groups:
            outputs = self._write(group, on_progress)
            for prompts in group:
                measurement = self._compare(prompts.handoff, outputs)
                on_progress(1.0 - _DECODING_SHARE)
                if measurement is not None:
                    yield measurement

    def _prepare(self, handoff: Handoff, max_model_len: int) -> _Prompts:
        producers = tuple(tuple(self._prompt(p.system, p.user)) for p in handoff.producers)
        nothing = handoff.consumer.user([""] * len(producers))
        read = math.ceil(_READ_MORE * self._max_tokens) * len(producers)
        consumer = len(self._prompt(handoff.consumer.system, nothing)) + read + 1
        lengths = [*(len(ids) + self._max_tokens for ids in producers), consumer]
        if max(lengths) > max_model_len:
            raise ProfileError(
                f"hand-off '{handoff.id}' may need {max(lengths)} tokens in one prompt with its "
                f"answer, the model takes {max_model_len}: shorten it, or let producers write less"
            )
        return _Prompts(handoff, producers, sum(lengths), max(lengths))

    def _write(
        self, group: Sequence[_Prompts], on_progress: Callable[[float], None]
    ) -> dict[str, str]:
        """Lets the producers of a group write; their texts by request id."""
        shares: dict[str, float] = {}
        requests = []
        for prompts in group:
            for index, ids in enumerate(prompts.producers):
                request = GenerateRequest(
                    f"{prompts.handoff.id}/{index}",
                    ids,
                    SamplingParams(self._max_tokens, temperature=0.0),
                    RelayOptions(session=prompts.handoff.id, policy="full"),
                )
                shares[request.request_id] = _DECODING_SHARE / len(prompts.producers)
                requests.append(request)
        return _serve(self.core, requests, shares, on_progress)

    def _compare(self, handoff: Handoff, outputs: dict[str, str]) -> Measurement | None:
        texts = [outputs[f"{handoff.id}/{index}"] for index in range(len(handoff.producers))]
        ids = tuple(self._prompt(handoff.consumer.system, handoff.consumer.user(texts)))
        reader = GenerateRequest(
            f"{handoff.id}/{_READER}",
            ids,
            SamplingParams(1, temperature=0.0),
            RelayOptions(session=handoff.id, policy="full"),
            tenant=_READER,
        )
        _serve(self.core, [reader], {}, lambda _: None)
        (computed,) = self._recordings(_READER, handoff.id)
        found = self._deviations(SessionKey("", handoff.id), ids, computed)
        self.core.delete_session("", handoff.id)
        self.core.delete_session(_READER, handoff.id)
        if not found:
            return None
        values = np.concatenate([deviation.values for deviation in found], axis=1)
        keys = np.concatenate([deviation.keys for deviation in found], axis=1)
        return Measurement(
            handoff.id, values.shape[1], handoff_curves(values, keys, self._rounding)
        )

    def _deviations(
        self, key: SessionKey, ids: tuple[int, ...], computed: Recording
    ) -> list[KVDeviation]:
        """One entry for every run of generated tokens that the engine would relay."""
        sources = self._recordings(key.tenant, key.session)
        start = max(_num_common(ids, source.token_ids) for source in sources)  # is a prefix hit
        slots = self.core.runner.cache.slots
        found = []
        for segment in self.core.recordings.match(key, list(ids), start):
            source = self.core.recordings[segment.recording_id]
            skip = max(source.num_prompt_tokens - segment.source_start, 0)
            written = segment.clip(segment.start + skip, segment.stop)
            if written.num_tokens < self._min_segment_tokens:
                continue
            relayed = (written.source_start, written.source_start + written.num_tokens)
            deviation = kv_deviation(
                self.core.runner.cache,
                slots([block.id for block in source.blocks], *relayed),
                slots([b.id for b in computed.blocks], written.start, written.stop),
                written.shift,
                self._inv_freq,
            )
            found.append(deviation)
        return found

    def _recordings(self, tenant: str, session: str) -> list[Recording]:
        for key, recordings, _ in self.core.recordings.sessions(tenant):
            if key.session == session:
                return recordings
        raise ProfileError(f"hand-off '{session}': nothing was recorded")


def _groups(prepared: Sequence[_Prompts]) -> Iterator[list[_Prompts]]:
    """Hand-offs that are worked on together: few, and not too long unless it is a single one."""
    group: list[_Prompts] = []
    for prompts in prepared:
        num_tokens = sum(p.max_tokens for p in group) + prompts.max_tokens
        if group and (len(group) == _GROUP_HANDOFFS or num_tokens > _GROUP_TOKENS):
            yield group
            group = []
        group.append(prompts)
    if group:
        yield group


def _small_core(parts: EngineParts, groups: Sequence[Sequence[_Prompts]]) -> EngineCore:
    """An engine whose cache holds one group: nothing is evicted before it was compared."""
    size = parts.cache.block_size
    num_tokens = max(sum(prompts.max_tokens for prompts in group) for group in groups)
    num_requests = max(sum(len(p.producers) + 1 for p in group) for group in groups)
    cache = CacheConfig(-(-num_tokens // size) + num_requests, size)
    longest = max(prompts.max_request_tokens for group in groups for prompts in group)
    scheduler = replace(parts.scheduler, max_model_len=longest)
    return build_core(replace(parts, cache=cache, scheduler=scheduler))


def _serve(
    core: EngineCore,
    requests: Sequence[GenerateRequest],
    shares: dict[str, float],
    on_progress: Callable[[float], None],
) -> dict[str, str]:
    """Serves requests together; the answers' texts by request id."""
    texts = {request.request_id: "" for request in requests}
    limits = {request.request_id: request.sampling.max_tokens for request in requests}
    left = dict(shares)
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            name = output.request_id
            if output.error is not None:
                raise ProfileError(f"{name}: {output.error}")
            texts[name] += output.text
            if name in left:
                step = shares[name] * len(output.token_ids) / limits[name]
                done = output.finish_reason is not None
                on_progress(left[name] if done else step)
                left[name] -= step
    return texts


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common start."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
