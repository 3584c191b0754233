"""What the caller of one request has been told so far, and what there is to tell it next."""

from __future__ import annotations

from dataclasses import dataclass

from relaykv.engine.batch import SampledToken
from relaykv.engine.detokenizer import Detokenizer
from relaykv.engine.request import FinishReason, RequestOutput, TokenLogprob
from relaykv.engine.request_state import Request


@dataclass(slots=True)
class Answer:
    """Makes the outputs of one request, so that nothing is told twice."""

    detokenizer: Detokenizer
    num_layers: int  # of the model, for the relay report
    num_tokens_sent: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # collected until the first output
    relay_reported: bool = False

    def output(
        self,
        request: Request,
        text: str,
        token: SampledToken | None = None,
        reason: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """The next output: `text` and `token` are what is new, `reason` is for the last one."""
        report = None
        prompt_logprobs = () if self.relay_reported else self.prompt_logprobs
        if reason is not None or not self.relay_reported:
            report = request.report(self.num_layers)
            self.relay_reported = True
        if token is not None:
            self.num_tokens_sent += 1
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
