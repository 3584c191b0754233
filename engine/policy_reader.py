"""Reads one prompt under several policies, each with the KV cache that it would put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from relaykv.engine.core import EngineCore
from relaykv.engine.forced_pass import forced_pass_of
from relaykv.engine.producers import serve
from relaykv.engine.recording import SessionKey
from relaykv.engine.relay_report import RelayReport
from relaykv.engine.request import (
    GenerateRequest,
    RelayOptions,
    RequestOutput,
    SamplingParams,
)
from relaykv.engine.segment import Segment

_Name = TypeVar("_Name")

_WRITERS = ""  # the tenant in whose sessions producers have written
_FULL = " full"  # no policy's name, so a tenant of its own


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer, and what its tokens were chosen by."""

    choices: tuple[int, ...]  # the likeliest token at every position, the end of the turn too
    log_probs: Tensor  # fp32 [positions, vocab]
    text: str
    relay: RelayReport
    num_matched: int = 0  # tokens that could be relayed, behind the prefix hit


class PolicyReader:
    """Serves prompts on an idle engine, whose runner it changes for good.

    Every policy works in a tenant of its own, so that none of them hits what another, or the
    full prefill, has left in the prefix cache, nor learns from it.
    """

    def __init__(self, core: EngineCore, policies: Sequence[str], min_segment_tokens: int) -> None:
        """Takes the names of policies to compare, `full` not among them."""
        self.policies = tuple(policies)
        self._core = core
        self._min_segment_tokens = min_segment_tokens
        self._pass = forced_pass_of(core.runner)

    def share(self, session: str) -> None:
        """Lets every policy relay what producers have written in a session."""
        recordings = self._core.recordings
        written = {key.session: found for key, found, _ in recordings.sessions(_WRITERS)}
        for recording in written.get(session, []):
            for policy in self.policies:  # in the very same blocks
                recordings.add(
                    recording.request_id,
                    SessionKey(policy, session),
                    recording.token_ids,
                    recording.blocks,
                    recording.num_prompt_tokens,
                    recording.taint,
                    recording.agent_class,
                    recording.question,
                )

    def read_full(
        self, prompts: Mapping[str, Sequence[int]], num_tokens: int
    ) -> dict[str, Reading]:
        """Answers prompts with everything computed, all in one batch.

        Args:
            prompts: by name.
            num_tokens: of an answer at most, its end included.

        Returns:
            By the same names.
        """
        greedy = SamplingParams(num_tokens, temperature=0.0)
        requests = {
            name: GenerateRequest(f"{name}/full", tuple(ids), greedy, tenant=_FULL)
            for name, ids in prompts.items()
        }
        return self._serve(requests, {})

    def read(
        self,
        prompts: Mapping[str, Sequence[int]],
        full: Mapping[str, Reading],
        keep: bool = False,
    ) -> dict[str, dict[str, Reading]]:
        """Forces the answers of a full prefill through every policy's cache of the same prompts.

        Args:
            prompts, full: by session.
            keep: whether each policy keeps prompt and answer for later prompts of the session.

        Returns:
            By session and policy.
        """
        requests: dict[tuple[str, str], GenerateRequest] = {}
        # Looked for before: a prompt that is kept would be found in itself.
        found: dict[tuple[str, str], list[Segment]] = {}
        forced: dict[str, Sequence[int]] = {}
        for session, prompt in prompts.items():
            choices = full[session].choices
            answer = SamplingParams(len(choices), temperature=0.0)
            for policy in self.policies:
                request_id = f"{session}/{policy}"
                relay = RelayOptions(session, policy, store=keep)
                requests[session, policy] = GenerateRequest(
                    request_id, tuple(prompt), answer, relay, tenant=policy
                )
                found[session, policy] = self._match(SessionKey(policy, session), prompt)
                forced[request_id] = choices
        readings = self._serve(requests, forced)
        by_session: dict[str, dict[str, Reading]] = {session: {} for session in prompts}
        for (session, policy), reading in readings.items():
            num_matched = self._num_matched(found[session, policy], reading)
            by_session[session][policy] = replace(reading, num_matched=num_matched)
        return by_session

    def teach(self, session: str, prompt: Sequence[int], teachers: Mapping[str, str]) -> None:
        """Reads a prompt so that policies can learn from it.

        Args:
            teachers: by the name of a policy that learns, the one that serves the prompt for it.
        """
        one = SamplingParams(1, temperature=0.0)
        requests = [
            GenerateRequest(
                f"{session}/{policy}/lesson",
                tuple(prompt),
                one,
                RelayOptions(session, teacher, store=False),
                tenant=policy,
            )
            for policy, teacher in teachers.items()
        ]
        serve(self._core, requests)

    def answers(
        self, session: str, prompt: Sequence[int], policies: Sequence[str], num_tokens: int
    ) -> dict[str, str]:
        """What policies answer to a prompt that they have just read, greedily."""
        greedy = SamplingParams(num_tokens, temperature=0.0)
        requests = {
            policy: GenerateRequest(
                f"{session}/{policy}/answer",
                tuple(prompt),
                greedy,
                RelayOptions(session, policy, store=False),
                policy,
            )
            for policy in policies
        }
        served = serve(self._core, list(requests.values()))
        return {
            policy: "".join(output.text for output in served[request.request_id])
            for policy, request in requests.items()
        }

    def forget(self, session: str) -> None:
        """Deletes a session everywhere."""
        for tenant in (_WRITERS, *self.policies):
            self._core.delete_session(tenant, session)

    def _match(self, key: SessionKey, prompt: Sequence[int]) -> list[Segment]:
        return self._core.recordings.match(key, list(prompt), 0)

    def _num_matched(self, found: Sequence[Segment], reading: Reading) -> int:
        relay = reading.relay
        counts = (relay.num_relayed_tokens, relay.num_recomputed_tokens, relay.num_computed_tokens)
        start = relay.num_prefix_tokens
        stop = start + sum(counts) - 1  # the last token is always computed
        lengths = [segment.clip(start, stop).num_tokens for segment in found]
        return sum(length for length in lengths if length >= self._min_segment_tokens)

    def _serve(
        self, requests: Mapping[_Name, GenerateRequest], forced: Mapping[str, Sequence[int]]
    ) -> dict[_Name, Reading]:
        for request in requests.values():
            self._pass.watch(request.request_id, forced.get(request.request_id))
        served = serve(self._core, list(requests.values()))
        return {
            name: _reading(self._pass.take(r.request_id), served[r.request_id])
            for name, r in requests.items()
        }


def _reading(logits: list[Tensor], outputs: Sequence[RequestOutput]) -> Reading:
    stacked = torch.stack(logits)  # [positions, vocab]
    reports = [output.relay for output in outputs if output.relay is not None]
    return Reading(
        choices=tuple(stacked.argmax(dim=-1).tolist()),
        log_probs=stacked.log_softmax(dim=-1),
        text="".join(output.text for output in outputs),
        relay=reports[-1],
    )
