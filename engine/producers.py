"""Lets the producers of hand-offs write, with greedy decoding, on an engine as small as will do.

What stays in the KV cache is what decoding leaves there, kept as recordings of one session for
every hand-off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relaykv.engine.assembly import EngineParts, build_core
from relaykv.engine.config import CacheConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.forced_pass import forced_pass_of
from relaykv.engine.handoff import Handoff, HandoffError
from relaykv.engine.request import GenerateRequest, RelayOptions, RequestOutput, SamplingParams

# Producers of one group decode together. The sizes do not depend on the machine, so that two
# runs compute the same.
_GROUP_HANDOFFS = 4
_GROUP_TOKENS = 49_152
# A text may become more tokens when it is read than it had when it was written.
READ_MORE = 1.5

Prompt = Callable[[str, str], Sequence[int]]  # of a system text, perhaps empty, and a user text
Progress = Callable[[float], None]  # is told of further work done


@dataclass(frozen=True, slots=True)
class HandoffPrompts:
    """A hand-off whose producers' prompts are token ids."""

    handoff: Handoff
    producers: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...] | None, ...]  # that they are to write; None: what they will
    num_consumer_tokens: int  # that the consumer's prompt and answer may take
    max_tokens: int  # of all its requests together
    max_request_tokens: int  # of its longest request

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of the producers' requests."""
        return tuple(f"{self.handoff.id}/{index}" for index in range(len(self.producers)))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens that agents write at most."""

    producer: int
    consumer: int


class Producers:
    """The producers of a set of hand-offs.

    Attributes:
        groups: the hand-offs that are worked on together.
        core: holds a group at a time: nothing is evicted before it has been read.
    """

    def __init__(
        self,
        parts: EngineParts,
        prompt: Prompt,
        handoffs: Sequence[Handoff],
        lengths: Lengths,
        num_readers: int = 1,
    ) -> None:
        """
        Args:
            parts: of the model, whose own cache size is not used.
            prompt: renders and tokenises, as the server would.
            num_readers: requests with the consumer's prompt that there is to be room for.

        Raises:
            HandoffError: a hand-off is too long for the model.
        """
        self._lengths = lengths
        encode = parts.tokenizer.encode
        prepared = [_prepare(prompt, encode, h, lengths, num_readers) for h in handoffs]
        for prompts in prepared:
            _check_length(prompts, parts.scheduler.max_model_len)
        self.groups = list(_groups(prepared))
        self.core = _small_core(parts, self.groups, num_readers)
        self._forced = forced_pass_of(self.core.runner)

    def write(self, group: Sequence[HandoffPrompts], on_progress: Progress) -> dict[str, str]:
        """Lets the producers of a group write.

        Args:
            on_progress: counts hand-offs.

        Returns:
            Their texts by request id.
        """
        requests = []
        shares: dict[str, float] = {}
        for prompts in group:
            asked = [producer.user for producer in prompts.handoff.producers]
            for request_id, ids, output, question in zip(
                prompts.request_ids, prompts.producers, prompts.outputs, asked, strict=True
            ):
                num_tokens = self._lengths.producer if output is None else len(output)
                request = GenerateRequest(
                    request_id,
                    ids,
                    SamplingParams(num_tokens, temperature=0.0, ignore_eos=output is not None),
                    RelayOptions(prompts.handoff.id, policy="full", question=question),
                )
                if output is not None:
                    self._forced.force(request_id, output)
                requests.append(request)
                shares[request_id] = 1 / len(prompts.producers)
        outputs = serve(self.core, requests, shares, on_progress)
        return {name: "".join(output.text for output in all_) for name, all_ in outputs.items()}


def serve(
    core: EngineCore,
    requests: Sequence[GenerateRequest],
    shares: Mapping[str, float] | None = None,
    on_progress: Progress = lambda _: None,
) -> dict[str, list[RequestOutput]]:
    """Serves requests together on an idle engine.

    Args:
        shares: of the work that `on_progress` is told of, by request id.

    Returns:
        All outputs by request id.

    Raises:
        RuntimeError: the engine has failed; the message tells which request and why.
    """
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    limits = {request.request_id: request.sampling.max_tokens for request in requests}
    left = dict(shares or {})
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            name = output.request_id
            if output.error is not None:
                raise RuntimeError(f"{name}: {output.error}")
            outputs[name].append(output)
            if shares is not None and name in left:
                step = shares[name] * len(output.token_ids) / limits[name]
                done = output.finish_reason is not None
                on_progress(left[name] if done else step)
                left[name] -= step
    return outputs


def _prepare(
    prompt: Prompt,
    encode: Callable[[str], Sequence[int]],
    handoff: Handoff,
    lengths: Lengths,
    readers: int,
) -> HandoffPrompts:
    producers = tuple(tuple(prompt(p.system, p.user)) for p in handoff.producers)
    outputs = tuple(
        None if p.output is None else tuple(encode(p.output)) for p in handoff.producers
    )
    longest = [lengths.producer if output is None else len(output) for output in outputs]
    nothing = handoff.consumer.user([""] * len(producers))
    read = sum(math.ceil(READ_MORE * num_tokens) for num_tokens in longest)
    consumer = len(prompt(handoff.consumer.system, nothing)) + read + lengths.consumer
    written = [len(ids) + length for ids, length in zip(producers, longest, strict=True)]
    num_tokens = sum(written) + readers * consumer
    return HandoffPrompts(
        handoff, producers, outputs, consumer, num_tokens, max(*written, consumer)
    )


def _check_length(prompts: HandoffPrompts, max_model_len: int) -> None:
    if prompts.max_request_tokens > max_model_len:
        raise HandoffError(
            f"hand-off '{prompts.handoff.id}' may need {prompts.max_request_tokens} tokens in one "
            f"prompt with its answer, the model takes {max_model_len}: shorten it, or let "
            "producers write less"
        )


def _groups(prepared: Sequence[HandoffPrompts]) -> Iterator[list[HandoffPrompts]]:
    """Hand-offs that are worked on together: few, and not too long unless it is a single one."""
    group: list[HandoffPrompts] = []
    for prompts in prepared:
        num_tokens = sum(p.max_tokens for p in group) + prompts.max_tokens
        if group and (len(group) == _GROUP_HANDOFFS or num_tokens > _GROUP_TOKENS):
            yield group
            group = []
        group.append(prompts)
    if group:
        yield group


def _small_core(
    parts: EngineParts, groups: Sequence[Sequence[HandoffPrompts]], num_readers: int
) -> EngineCore:
    size = parts.cache.block_size
    num_tokens = max(sum(prompts.max_tokens for prompts in group) for group in groups)
    # What kvcomm keeps from group to group stands beside that.
    num_tokens += math.ceil(num_tokens * parts.relay.anchor_share / (1 - parts.relay.anchor_share))
    num_requests = max(sum(len(p.producers) + num_readers for p in group) for group in groups)
    cache = CacheConfig(-(-num_tokens // size) + num_requests, size)
    longest = max(prompts.max_request_tokens for group in groups for prompts in group)
    scheduler = replace(parts.scheduler, max_model_len=longest)
    return build_core(replace(parts, cache=cache, scheduler=scheduler))
