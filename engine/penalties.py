"""How often tokens have occurred in requests whose logits are penalised for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaykv.engine.batch import SamplingRow
from relaykv.engine.request import SamplingParams


def has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


@dataclass(slots=True)
class _State:
    """What has been counted of one request."""

    prompt_token_ids: Sequence[int]
    output_token_ids: list[int] = field(default_factory=list)
    counts: Tensor | None = None  # [2, V] fp32: in the prompt, in the output

    def fits(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Whether what has been counted is the prompt and the beginning of an output."""
        is_same = self.prompt_token_ids is prompt or list(self.prompt_token_ids) == list(prompt)
        num_counted = len(self.output_token_ids)
        return is_same and self.output_token_ids == list(output[:num_counted])


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a step's rows that are to be counted before its penalties apply."""

    request_ids: tuple[str, ...]
    states: tuple[_State, ...]
    places: NDArray[np.int64]  # in the flat counts [rows, 2, V]
    vocab_size: int


class PenaltyCounts:
    """Counts on the device, kept from one step to the next.

    The counts of a request follow from its tokens alone. They are kept because counting a prompt
    again for every token is slow, and made again where they are missing or do not fit.
    """

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def find_new(self, rows: Sequence[SamplingRow], vocab_size: int) -> NewTokens:
        """What is still to be counted; the host's half. Requests without a row are forgotten.

        Raises:
            IndexError: a token id is none of the vocabulary.
        """
        known, self._states = self._states, {}  # if the step fails, all is counted again
        states: list[_State] = []
        places = [np.zeros(0, dtype=np.int64)]
        for index, row in enumerate(rows):
            # Only the repetition penalty looks at the prompt.
            prompt = row.prompt_token_ids if row.params.repetition_penalty != 1 else ()
            state = known.pop(row.request_id, None)
            start = 2 * index * vocab_size
            if state is None or not state.fits(prompt, row.output_token_ids):
                state = _State(prompt)
                places.append(_places(prompt, start, vocab_size))
            new = row.output_token_ids[len(state.output_token_ids) :]
            places.append(_places(new, start + vocab_size, vocab_size))
            state.output_token_ids.extend(new)
            states.append(state)
        request_ids = tuple(row.request_id for row in rows)
        return NewTokens(request_ids, tuple(states), np.concatenate(places), vocab_size)

    def count(self, new: NewTokens, places: Tensor) -> tuple[Tensor, Tensor]:
        """The device's half.

        Args:
            new: of the same step.
            places: its places, on the device.

        Returns:
            Occurrences in the prompt and in the output, [rows, V] fp32 each.
        """
        shape = (2, new.vocab_size)
        counts = torch.stack(  # new memory, so it may be written below
            [
                torch.zeros(shape, device=places.device) if state.counts is None else state.counts
                for state in new.states
            ]
        )
        # Adding ones is exact and so the same in whatever order a device does it.
        counts.flatten().index_add_(0, places, torch.ones(places.shape, device=places.device))
        for state, own in zip(new.states, counts, strict=True):
            state.counts = own
        self._states = dict(zip(new.request_ids, new.states, strict=True))
        prompt_counts, output_counts = counts.unbind(dim=1)
        return prompt_counts, output_counts


def _places(token_ids: Sequence[int], start: int, vocab_size: int) -> NDArray[np.int64]:
    ids = np.array(token_ids, dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise IndexError(f"a token to be penalised is not among the {vocab_size} of the model")
    return ids + start
