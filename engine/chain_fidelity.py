"""Measures how policies drift along chains of agents, whose relayed KV was itself relayed.

The texts are those that full prefills write, the same for every policy. At each hop a policy reads
the text from its own cache of the agent before, and the agent's answer is forced through what it
has put together, and kept for the next hop: as deep in the chain as serving it would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from relaykv.engine.assembly import EngineParts, build_core
from relaykv.engine.chain import Chain
from relaykv.engine.chain_report import HopScore
from relaykv.engine.config import CacheConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.fidelity import score
from relaykv.engine.handoff import HandoffError
from relaykv.engine.policy_reader import PolicyReader
from relaykv.engine.producers import READ_MORE, Progress, Prompt

_GROUP_CHAINS = 2  # that are worked on together
_NUM_HOPS_KEPT = 3  # whose recordings there is room for; only the last one's are read


class ChainFidelity:
    """Works through chains.

    Attributes:
        core: an engine of its own, as small as will do.
        reader: of that engine.
    """

    def __init__(
        self,
        parts: EngineParts,
        prompt: Prompt,
        chains: Sequence[Chain],
        policies: Sequence[str],
        num_tokens: int,
        num_compared: int,
    ) -> None:
        """
        Args:
            parts: of the model, whose own cache size is not used.
            prompt: renders and tokenises, as the server would.
            policies: names, `full` not among them.
            num_tokens: that every agent writes at most.
            num_compared: positions of each answer whose distributions are compared.

        Raises:
            HandoffError: a chain is too long for the model.
        """
        self._prompt = prompt
        self._num_tokens = num_tokens
        self._num_compared = num_compared
        self._chains = chains
        longest = max(self._longest(chain, parts.scheduler.max_model_len) for chain in chains)
        self.core = _small_core(parts, longest, (len(policies) + 1) * _GROUP_CHAINS)
        self.reader = PolicyReader(self.core, policies, parts.relay.min_segment_tokens)

    def measure(self, on_progress: Progress) -> Iterator[list[HopScore]]:
        """Works through the chains; those whose text becomes too short for a hop give no scores.

        Args:
            on_progress: is told of every further piece of work, in chains.
        """
        for start in range(0, len(self._chains), _GROUP_CHAINS):
            group = self._chains[start : start + _GROUP_CHAINS]
            scores: dict[str, list[HopScore]] = {chain.id: [] for chain in group}
            texts = {chain.id: "" for chain in group}
            for hop in range(len(group[0].agents)):
                self._pass_on(hop, group, texts, scores)
                on_progress(len(group) / len(group[0].agents))
            for chain in group:
                self.reader.forget(chain.id)
                hops = {score.hop for score in scores[chain.id]}
                if len(hops) == chain.num_hops:
                    yield scores[chain.id]

    def _pass_on(
        self,
        hop: int,
        group: Sequence[Chain],
        texts: dict[str, str],
        scores: dict[str, list[HopScore]],
    ) -> None:
        """Lets the agents behind a hop read and write; hop 0 only writes."""
        prompts = {}
        for chain in group:
            agent = chain.agents[hop]
            prompts[chain.id] = tuple(self._prompt(agent.system, agent.user(texts[chain.id])))
        full = self.reader.read_full(prompts, self._num_tokens)
        readings = self.reader.read(prompts, full, keep=True)
        for name in prompts:
            texts[name] = full[name].text
            read = readings[name].values()
            if hop and all(reading.num_matched for reading in read):
                compared = self._num_compared
                found = [score(name, full[name], reading, compared) for reading in read]
                scores[name] += [HopScore(hop, each) for each in found]

    def _longest(self, chain: Chain, max_model_len: int) -> int:
        """Tokens that the longest prompt of a chain may have with its answer."""
        text = math.ceil(READ_MORE * self._num_tokens)
        prompts = [self._prompt(agent.system, agent.user("")) for agent in chain.agents]
        longest = max(map(len, prompts)) + text + self._num_tokens
        if longest > max_model_len:
            raise HandoffError(
                f"chain '{chain.id}' may need {longest} tokens in one prompt with its answer, the "
                f"model takes {max_model_len}: shorten it, or let agents write less"
            )
        return longest


def _small_core(parts: EngineParts, longest: int, num_requests: int) -> EngineCore:
    size = parts.cache.block_size
    cache = CacheConfig(_NUM_HOPS_KEPT * num_requests * (-(-longest // size) + 1), size)
    scheduler = replace(parts.scheduler, max_model_len=longest)
    return build_core(replace(parts, cache=cache, scheduler=scheduler))
