"""Measures how near every policy's answers come to those of a full prefill, on hand-offs.

The answer of a full prefill is forced through each policy's cache, as serving puts it together;
the Kullback-Leibler divergence of the next-token distributions is taken position by position.
Greedy decoding under a policy gives the same tokens as the full prefill up to the first position
at which the likeliest tokens differ, so the same pass tells how long the two agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relaykv.engine.assembly import EngineParts
from relaykv.engine.divergence import kl_divergence
from relaykv.engine.fidelity_scores import Score, common_share, computed_share
from relaykv.engine.handoff import Handoff, holds_answer
from relaykv.engine.policy import Bands, Placement, find_policy
from relaykv.engine.policy_reader import PolicyReader, Reading
from relaykv.engine.producers import HandoffPrompts, Lengths, Producers, Progress, Prompt

_DECODING_SHARE = 0.7  # of the work on a hand-off, for the progress bar


@dataclass(frozen=True, slots=True)
class FidelityLengths:
    """Tokens."""

    producer: int  # that a producer writes at most
    compared: int  # of the consumer's answer, whose distributions are compared
    greedy: int  # of the consumer's answer at most, not fewer


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """One hand-off that something was relayed in."""

    handoff: str
    scores: tuple[Score, ...]  # one for each policy
    right: bool | None  # whether the full prefill's answer holds what was asked for


class Fidelity:
    """Works through hand-offs.

    Attributes:
        core: an engine of its own, as small as will do.
    """

    def __init__(
        self,
        parts: EngineParts,
        prompt: Prompt,
        handoffs: Sequence[Handoff],
        policies: Sequence[str],
        lengths: FidelityLengths,
        lessons: Sequence[Handoff] = (),
    ) -> None:
        """
        Args:
            parts: of the model, whose own cache size is not used.
            prompt: renders and tokenises, as the server would.
            policies: names, `full` not among them.
            lessons: hand-offs that policies which learn have seen before the others; not scored.

        Raises:
            HandoffError: a hand-off is too long for the model.
        """
        self._prompt = prompt
        self._lengths = lengths
        written = Lengths(lengths.producer, lengths.greedy)
        every = [*lessons, *handoffs]
        self._producers = Producers(parts, prompt, every, written, len(policies) + 1)
        self._lessons = {lesson.id for lesson in lessons}
        self._teachers = {
            name: "observe" if parts.policies[name].placement is Placement.LEARNED else name
            for name in policies
            if parts.policies[name].placement is not Placement.SHIFT
        }
        self.core = self._producers.core
        self._reader = PolicyReader(self.core, policies, parts.relay.min_segment_tokens)

    def measure(self, on_progress: Progress) -> Iterator[HandoffResult]:
        """Works through the hand-offs; those in which nothing can be relayed give no result.

        Args:
            on_progress: is told of every further piece of work, in hand-offs.
        """
        for group in self._producers.groups:
            texts = self._producers.write(
                group, lambda written: on_progress(_DECODING_SHARE * written)
            )
            prompts = {each.handoff.id: self._consumer_prompt(each, texts) for each in group}
            self._teach({name: ids for name, ids in prompts.items() if name in self._lessons})
            prompts = {name: ids for name, ids in prompts.items() if name not in self._lessons}
            full = self._reader.read_full(prompts, self._lengths.greedy)
            for name in prompts:
                self._reader.share(name)
            readings = self._reader.read(prompts, full)
            for each in group:
                name = each.handoff.id
                if name in self._lessons:
                    on_progress(1.0 - _DECODING_SHARE)
                    continue
                result = None
                if all(reading.num_matched for reading in readings[name].values()):
                    asked = _can_be_known(each, texts)
                    result = self._result(name, prompts[name], full[name], readings[name], asked)
                self._reader.forget(name)
                on_progress(1.0 - _DECODING_SHARE)
                if result is not None:
                    yield result

    def _teach(self, prompts: Mapping[str, Sequence[int]]) -> None:
        for name, ids in prompts.items():
            self._reader.share(name)
            self._reader.teach(name, ids, self._teachers)
            self._reader.forget(name)

    def _consumer_prompt(self, prompts: HandoffPrompts, texts: dict[str, str]) -> tuple[int, ...]:
        consumer = prompts.handoff.consumer
        outputs = [texts[name] for name in prompts.request_ids]
        return tuple(self._prompt(consumer.system, consumer.user(outputs)))

    def _result(
        self,
        name: str,
        prompt: Sequence[int],
        full: Reading,
        readings: Mapping[str, Reading],
        asked: str | None,
    ) -> HandoffResult:
        texts: dict[str, str] = {}
        if asked is not None:
            others = [p for p, reading in readings.items() if reading.choices != full.choices]
            texts = self._reader.answers(name, prompt, others, self._lengths.greedy)
        scores = []
        for policy, reading in readings.items():
            right = None if asked is None else holds_answer(texts.get(policy, full.text), asked)
            scores.append(score(name, full, reading, self._lengths.compared, right))
        right = None if asked is None else holds_answer(full.text, asked)
        return HandoffResult(name, tuple(scores), right)


def choose_policies(
    parts: EngineParts, names: Sequence[str] | None, bands: Sequence[Bands]
) -> tuple[EngineParts, list[str]]:
    """The policies to compare, `full` left out: it is what they are compared with.

    Args:
        names: None: all that relay anything.
        bands: further ones for `relay`, each under the name `relay INJECT,SELECT,STOP`. Hidden
            states are kept for one layer above the first, so all have to agree on that one.

    Returns:
        The parts that know these policies, and their names.

    Raises:
        ValueError: a policy is unknown, none is left, or bands cannot be had together.
    """
    every = [name for name, policy in parts.policies.items() if not policy.observes]
    chosen = every if names is None else list(names)
    num_layers = parts.model.config.num_layers
    found = {name: find_policy(parts.policies, name, num_layers) for name in chosen}
    policies = {**parts.policies, **found}
    for choice in bands:
        if choice.stop >= parts.model.config.num_layers:
            raise ValueError(f"bands: layer {choice.stop} is past the model's last one")
        name = f"relay {choice.inject},{choice.select},{choice.stop}"
        policies[name] = replace(parts.policies["relay"], name=name, bands=choice)
        chosen.append(name)
    relaying = [name for name in dict.fromkeys(chosen) if policies[name].relays]
    if not relaying:
        raise ValueError("there is no policy to compare with a full prefill")
    used = [policies[name].bands for name in relaying]
    injects = {choice.inject for choice in used if choice is not None and choice.inject > 0}
    if len(injects) > 1:
        layers = " and ".join(map(str, sorted(injects)))
        raise ValueError(
            f"policies inject at the layers {layers}, hidden states are kept for one only: "
            "choose other policies or bands"
        )
    hidden_layer = injects.pop() if injects else parts.hidden_layer
    return replace(parts, policies=policies, hidden_layer=hidden_layer), relaying


def score(
    case: str, full: Reading, reading: Reading, num_compared: int, right: bool | None = None
) -> Score:
    """Holds a policy's reading against that of a full prefill, of the same answer."""
    divergence = kl_divergence(full.log_probs[:num_compared], reading.log_probs[:num_compared])
    relay = reading.relay
    relayed = relay.num_relayed_tokens + relay.num_recomputed_tokens
    chosen = zip(full.choices[:num_compared], reading.choices[:num_compared], strict=True)
    equal = [ours == theirs for ours, theirs in chosen]
    return Score(
        case=case,
        policy=relay.policy,
        num_prompt_tokens=relay.num_prefix_tokens + relayed + relay.num_computed_tokens,
        num_matched_tokens=reading.num_matched,
        computed_share=computed_share(relayed, relay.recomputed_share, reading.num_matched),
        kl=float(divergence.mean()),
        first_kl=float(divergence[0]),
        next_token=sum(equal) / len(equal),
        greedy=common_share(full.choices, reading.choices),
        same_answer=full.choices == reading.choices,
        right=right,
    )


def _can_be_known(prompts: HandoffPrompts, texts: dict[str, str]) -> str | None:
    """The answer that is asked for, if the producers have handed it on at all."""
    answer = prompts.handoff.answer
    if answer is None or not any(holds_answer(texts[n], answer) for n in prompts.request_ids):
        return None
    return answer
