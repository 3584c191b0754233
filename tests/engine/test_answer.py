from __future__ import annotations

from typing import cast

from engine_factory import make_request
from tiny_core import SpellingTokenizer

from relaykv.engine.answer import Answer
from relaykv.engine.batch import SampledToken
from relaykv.engine.detokenizer import Detokenizer
from relaykv.engine.request import FinishReason, TokenLogprob
from relaykv.engine.tokenizer import Tokenizer


def new_answer() -> Answer:
    return Answer(Detokenizer(cast(Tokenizer, SpellingTokenizer())), num_layers=8)


def test_what_holds_for_the_prompt_is_told_with_the_first_output_only() -> None:
    request, answer = make_request("r", [1, 2, 3], session="s"), new_answer()
    answer.prompt_logprobs = (TokenLogprob(2, -1.0), TokenLogprob(3, -2.0))
    logprob = TokenLogprob(7, -0.5)

    first = answer.output(request, "7 ", SampledToken(7, logprob))
    second = answer.output(request, "8 ", SampledToken(8, None))

    assert (first.token_ids, first.text, first.logprobs) == ((7,), "7 ", (logprob,))
    assert [entry.token_id for entry in first.prompt_logprobs] == [2, 3]
    assert first.relay == request.report(8)
    assert (second.token_ids, second.logprobs) == ((8,), ())
    assert second.prompt_logprobs == ()
    assert second.relay is None
    assert answer.num_tokens_sent == 2


def test_the_last_output_reports_again_and_may_hold_no_token() -> None:
    request, answer = make_request("r", [1, 2, 3]), new_answer()
    answer.output(request, "7 ", SampledToken(7, None))

    last = answer.output(request, "", reason=FinishReason.ERROR, error="no more cheese")

    assert (last.token_ids, last.finish_reason, last.error) == (
        (),
        FinishReason.ERROR,
        "no more cheese",
    )
    assert last.relay is not None
    assert answer.num_tokens_sent == 1
