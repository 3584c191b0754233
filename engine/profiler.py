"""Measures on hand-offs how a model's relayed KV differs from computed KV, layer by layer.

The model profiled writes the producers' answers itself, with greedy decoding, so the KV compared
is the KV that decoding produced; the consumer's prompt is then computed in full beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relaykv.engine.assembly import EngineParts
from relaykv.engine.handoff import Handoff
from relaykv.engine.kv_comparison import KVDeviation, kv_deviation
from relaykv.engine.layer_curves import Measurement, handoff_curves
from relaykv.engine.producers import Lengths, Producers, Progress, Prompt, serve
from relaykv.engine.recording import Recording, SessionKey
from relaykv.engine.relay_profile import ProfileError
from relaykv.engine.request import GenerateRequest, RelayOptions, SamplingParams

_READER = "reader"  # the tenant of consumers: nothing but another prompt can be its prefix
_DECODING_SHARE = 0.75  # of the work on a hand-off, for the progress bar
# Cosines that differ from 1 by less are rounding, by the numeric type of the cache.
_ROUNDING = {"float32": 1e-6}
_COARSE_ROUNDING = 1e-4


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
            HandoffError: a hand-off is too long for the model.
        """
        self._prompt = prompt
        self._producers = Producers(parts, prompt, handoffs, Lengths(max_tokens, consumer=1))
        self._min_segment_tokens = parts.relay.min_segment_tokens
        self._inv_freq = parts.model.inv_freq
        dtype = str(parts.model.dtype).removeprefix("torch.")
        self._rounding = _ROUNDING.get(dtype, _COARSE_ROUNDING)
        self.core = self._producers.core

    def measure(self, on_progress: Progress) -> Iterator[Measurement]:
        """Works through the hand-offs; those that relay nothing give no measurement.

        Args:
            on_progress: is told of every further piece of work, in hand-offs.
        """
        for group in self._producers.groups:
            outputs = self._producers.write(
                group, lambda written: on_progress(_DECODING_SHARE * written)
            )
            for prompts in group:
                measurement = self._compare(prompts.handoff, outputs)
                on_progress(1.0 - _DECODING_SHARE)
                if measurement is not None:
                    yield measurement

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
        serve(self.core, [reader])
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


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common start."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
