"""The engine without a thread: requests in, steps, outputs out."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from relaykv.engine.batch import ModelRunnerOutput, SampledToken, ScheduledBatch
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.client import EngineStats, RecordingInfo, SessionInfo
from relaykv.engine.detokenizer import Detokenizer
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.policy import Policy
from relaykv.engine.recording import RecordingStore, SessionKey
from relaykv.engine.request import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    TokenLogprob,
)
from relaykv.engine.request_state import Request
from relaykv.engine.scheduler import Scheduler
from relaykv.engine.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answer:
    """What has been told about a request so far."""

    detokenizer: Detokenizer
    num_tokens_sent: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # collected until the first output
    relay_reported: bool = False


class EngineCore:
    """Holds everything of one engine. All methods but `prepare` belong to the engine thread.

    Attributes:
        runner, pool, recordings: the device, the blocks and what sessions have recorded; public
            for tools that measure, which read them between two steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        pool: BlockPool,
        recordings: RecordingStore,
        policies: Mapping[str, Policy],
        default_policy: str,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        bytes_per_block: int,
    ) -> None:
        self.runner = runner
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self.pool = pool
        self.recordings = recordings
        self._policies = policies
        self._default_policy = default_policy
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._bytes_per_block = bytes_per_block
        self._answers: dict[str, _Answer] = {}
        self._num_aborts = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def prepare(self, spec: GenerateRequest) -> None:
        """Does what a request needs and other requests should not wait for. For any thread.

        Raises:
            GrammarError: the request's grammar does not compile.
        """
        grammar, grammars = spec.sampling.grammar, self.runner.grammars
        if grammar is not None and grammars is not None:
            grammars.compile(grammar)

    def add(self, spec: GenerateRequest) -> None:
        """Takes a request in.

        Raises:
            ValueError: the prompt is empty or leaves no room for an answer, the policy is
                unknown, or the id is in use.
        """
        if not spec.prompt_token_ids:
            raise ValueError("the prompt has no tokens")
        if len(spec.prompt_token_ids) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(spec.prompt_token_ids)} tokens, "
                f"the model takes {self._max_model_len} with the answer"
            )
        seed = spec.sampling.seed
        request = Request(
            spec=spec,
            policy=self._policy_of(spec),
            seed=secrets.randbits(63) if seed is None else seed,
            token_ids=list(spec.prompt_token_ids),
        )
        self._scheduler.add(request)
        self._answers[request.id] = _Answer(Detokenizer(self._tokenizer, spec.sampling.stop))

    def abort(self, request_id: str) -> None:
        """Ends a request whose caller has gone; unknown and finished ids are ignored."""
        if request_id in self._scheduler:
            answer = self._answers.pop(request_id)
            self._scheduler.finish(request_id, FinishReason.ABORT, answer.num_tokens_sent)
            self._num_aborts += 1

    def step(self) -> list[RequestOutput]:
        """Schedules, executes and updates once.

        A step that raises ends the running requests with an error; waiting ones are served.
        """
        batch = self._scheduler.schedule()
        if not batch.requests:
            return []
        try:
            output = self.runner.execute(batch)
        except Exception:
            _log.exception("a step failed; its %d requests end with an error", len(batch.requests))
            return self._fail_running("the engine failed while it computed this request")
        return self._update(batch, output)

    def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        infos = []
        for key, recordings, last_used in self.recordings.sessions(tenant):
            num_blocks = len({block.id for r in recordings for block in r.blocks})
            infos.append(
                SessionInfo(
                    session=key.session,
                    recordings=tuple(
                        RecordingInfo(
                            r.request_id,
                            r.num_prompt_tokens,
                            len(r.token_ids) - r.num_prompt_tokens,
                            r.taint,
                        )
                        for r in recordings
                    ),
                    num_blocks=num_blocks,
                    num_bytes=num_blocks * self._bytes_per_block,
                    last_used=last_used,
                )
            )
        return tuple(infos)

    def delete_session(self, tenant: str, session: str) -> bool:
        return self.recordings.delete_session(SessionKey(tenant, session))

    def stats(self) -> EngineStats:
        blocks = self.pool.counts()
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=blocks.free,
            num_cached_blocks=blocks.cached,
            num_recorded_blocks=blocks.recorded,
            num_used_blocks=blocks.used,
            num_total_blocks=self.pool.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_aborts=self._num_aborts,
        )

    def _policy_of(self, spec: GenerateRequest) -> Policy:
        name = spec.relay.policy
        if spec.relay.session is None:
            name = "full"  # nothing approximate ever happens without a session
        policy = self._policies.get(name or self._default_policy)
        if policy is None:
            raise ValueError(f"unknown policy {name!r}; known: {', '.join(self._policies)}")
        return policy

    def _update(self, batch: ScheduledBatch, output: ModelRunnerOutput) -> list[RequestOutput]:
        ended = {i for i, token in output.sampled.items() if self._is_end(i, token)}
        self._scheduler.update(batch, output, ended)
        self._collect_prompt_logprobs(batch, output)
        outputs = []
        for request_id, token in output.sampled.items():
            request = self._scheduler[request_id]
            if token.error is not None:
                outputs.append(self._finish(request, FinishReason.ERROR, "", error=token.error))
            elif request_id in ended:
                text = self._answers[request_id].detokenizer.finish()
                outputs.append(self._finish(request, FinishReason.STOP, text))
            else:
                outputs.append(self._advance(request, token))
        return outputs

    def _collect_prompt_logprobs(self, batch: ScheduledBatch, output: ModelRunnerOutput) -> None:
        for part in batch.requests:
            answer = self._answers[part.request_id]
            if part.start == 0:  # the first chunk, perhaps once more after a preemption
                answer.prompt_logprobs = ()
            answer.prompt_logprobs += output.scored.get(part.request_id, ())

    def _is_end(self, request_id: str, token: SampledToken) -> bool:
        params = self._scheduler[request_id].spec.sampling
        if token.error is not None or token.token_id in params.stop_token_ids:
            return True
        # Nothing but an end of turn can follow a grammar that is satisfied.
        goes_on = params.ignore_eos and params.grammar is None
        return token.token_id in self._eos_token_ids and not goes_on

    def _advance(self, request: Request, token: SampledToken) -> RequestOutput:
        """Turns a new token into text and finds out whether it is the last."""
        detokenizer = self._answers[request.id].detokenizer
        new = detokenizer.push(token.token_id)
        if new.stopped is not None:
            return self._finish(request, FinishReason.STOP, new.text, token)
        at_limit = (
            request.num_output_tokens >= request.spec.sampling.max_tokens
            or len(request.token_ids) >= self._max_model_len
        )
        if at_limit:
            text = new.text + detokenizer.finish()
            return self._finish(request, FinishReason.LENGTH, text, token)
        return self._output(request, new.text, token)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        text: str,
        token: SampledToken | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        output = self._output(request, text, token, reason, error)
        answer = self._answers.pop(request.id)
        self._scheduler.finish(request.id, reason, answer.num_tokens_sent)
        return output

    def _output(
        self,
        request: Request,
        text: str,
        token: SampledToken | None,
        reason: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        answer = self._answers[request.id]
        report = None
        prompt_logprobs = () if answer.relay_reported else answer.prompt_logprobs
        if reason is not None or not answer.relay_reported:
            report = request.report(self.runner.num_layers)
            answer.relay_reported = True
        if token is not None:
            answer.num_tokens_sent += 1
        return RequestOutput(
            request_id=request.id,
            text=text,
            token_ids=() if token is None else (token.token_id,),
            usage=request.usage(),
            logprobs=() if token is None or token.logprob is None else (token.logprob,),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            relay=report,
            error=error,
        )

    def _fail_running(self, message: str) -> list[RequestOutput]:
        return [
            self._finish(request, FinishReason.ERROR, "", error=message)
            for request in self._scheduler.running()
        ]
