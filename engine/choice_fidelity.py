"""Measures whether policies choose what a full prefill chooses: judges, and roles turned round.

A choice is read from the next-token distribution at the start of the answer, restricted to the
first tokens of the words to choose among. So no answer has to be decoded, and a choice is there
even where the model would rather begin with another word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from relaykv.engine.assembly import EngineParts
from relaykv.engine.choice_report import FULL, ChoiceScore
from relaykv.engine.choice_trial import ChoiceTrial, Variant
from relaykv.engine.divergence import kl_divergence
from relaykv.engine.fidelity_scores import computed_share
from relaykv.engine.handoff import HandoffError
from relaykv.engine.policy_reader import PolicyReader, Reading
from relaykv.engine.producers import HandoffPrompts, Lengths, Producers, Progress, Prompt

_DECODING_SHARE = 0.8  # of the work on a trial, for the progress bar


class ChoiceFidelity:
    """Works through trials.

    Attributes:
        core: an engine of its own, as small as will do.
    """

    def __init__(
        self,
        parts: EngineParts,
        prompt: Prompt,
        trials: Sequence[ChoiceTrial],
        policies: Sequence[str],
        num_tokens: int,
    ) -> None:
        """
        Args:
            parts: of the model, whose own cache size is not used.
            prompt: renders and tokenises, as the server would.
            policies: names, `full` not among them.
            num_tokens: that a producer writes at most.

        Raises:
            HandoffError: a trial is too long for the model, or its choices begin alike.
        """
        self._prompt = prompt
        self._trials = {trial.id: trial for trial in trials}
        self._tokens = {trial.id: _first_tokens(trial, parts.tokenizer.encode) for trial in trials}
        handoffs = [trial.handoff for trial in trials]
        lengths = Lengths(num_tokens, consumer=1)
        self._producers = Producers(parts, prompt, handoffs, lengths, len(policies) + 1)
        self.core = self._producers.core
        self._reader = PolicyReader(self.core, policies, parts.relay.min_segment_tokens)

    def measure(self, on_progress: Progress) -> Iterator[list[ChoiceScore]]:
        """Works through the trials; those in which nothing can be relayed give no scores.

        Args:
            on_progress: is told of every further piece of work, in trials.
        """
        for group in self._producers.groups:
            texts = self._producers.write(
                group, lambda written: on_progress(_DECODING_SHARE * written)
            )
            for each in group:
                name = each.handoff.id
                self._reader.share(name)
                scores = self._scores(each, texts)
                self._reader.forget(name)
                on_progress(1.0 - _DECODING_SHARE)
                if scores:
                    yield scores

    def _scores(self, prompts: HandoffPrompts, texts: Mapping[str, str]) -> list[ChoiceScore]:
        name = prompts.handoff.id
        outputs = [texts[request_id] for request_id in prompts.request_ids]
        scores = []
        for variant in self._trials[name].variants():
            user = prompts.handoff.consumer.user([outputs[index] for index in variant.order])
            prompt = {name: tuple(self._prompt(variant.system, user))}
            full = self._reader.read_full(prompt, 1)
            readings = self._reader.read(prompt, full)[name]
            if not all(reading.num_matched for reading in readings.values()):
                return []
            reference = _choice_log_probs(full[name], self._tokens[name])
            scores.append(_score(name, variant, FULL, 1.0, reference, reference))
            for policy, reading in readings.items():
                found = _choice_log_probs(reading, self._tokens[name])
                share = _share(reading)
                scores.append(_score(name, variant, policy, share, reference, found))
        return scores


def _first_tokens(trial: ChoiceTrial, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
    tokens = tuple(encode(choice)[0] for choice in trial.choices)
    if len(set(tokens)) < len(tokens):
        raise HandoffError(f"'{trial.id}': this model's first tokens of the choices are the same")
    return tokens


def _choice_log_probs(reading: Reading, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities of the choices alone, fp32 [1, choices]."""
    return reading.log_probs[:1, list(tokens)].log_softmax(dim=-1)


def _share(reading: Reading) -> float:
    relay = reading.relay
    relayed = relay.num_relayed_tokens + relay.num_recomputed_tokens
    return computed_share(relayed, relay.recomputed_share, reading.num_matched)


def _score(
    name: str, variant: Variant, policy: str, share: float, full: Tensor, found: Tensor
) -> ChoiceScore:
    place, chosen = int(full.argmax()), int(found.argmax())
    right = None if variant.right is None else chosen == variant.right
    return ChoiceScore(
        trial=name,
        variant=variant.name,
        policy=policy,
        computed_share=share,
        place=chosen,
        same=chosen == place,
        kl=float(kl_divergence(full, found)),
        right=right,
        log_odds=float(found[0, 0] - found[0, 1]) * (-1.0 if variant.is_turned else 1.0),
    )
