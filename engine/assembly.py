"""Builds the engine's parts from options: the only place that knows all three rings."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from relaykv.engine.admission import Admission
from relaykv.engine.anchor_gate import AnchorGate
from relaykv.engine.anchor_pools import AnchorPools
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.client import ModelCard
from relaykv.engine.config import (
    CacheConfig,
    DeviceConfig,
    RelayConfig,
    SchedulerConfig,
)
from relaykv.engine.core import EngineCore
from relaykv.engine.decode_graphs import Capture
from relaykv.engine.device import (
    build_runner,
    choose_device,
    choose_dtype,
    choose_kernels,
    device_config,
)
from relaykv.engine.grammar import GrammarMatchers
from relaykv.engine.handoff_lessons import HandoffLessons
from relaykv.engine.handoff_slots import NUM_LEVELS, HandoffSlots
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.loader import load_model, resolve_model
from relaykv.engine.model_store import default_model_name
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.models.fingerprint import model_fingerprint
from relaykv.engine.offset_memory import OffsetMemory
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Policy, builtin_policies, find_policy
from relaykv.engine.prefix_cache import PrefixCache
from relaykv.engine.recording import RecordingStore
from relaykv.engine.relay_profile import BandsSource, ChosenBands, choose_bands
from relaykv.engine.scheduler import Scheduler
from relaykv.engine.sizing import choose_cache, choose_max_model_len, choose_step_tokens
from relaykv.engine.tokenizer import Tokenizer
from relaykv.kernels.attention import AttentionBackend

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that a core is built from."""

    folder: Path  # of the model: weights, tokenizer, chat template
    model: DecoderModel
    tokenizer: Tokenizer
    fingerprint: str
    policies: Mapping[str, Policy]
    hidden_layer: int
    cache: CacheConfig
    scheduler: SchedulerConfig
    relay: RelayConfig
    card: ModelCard
    device: DeviceConfig = field(default_factory=DeviceConfig)
    bands_source: BandsSource = BandsSource.GIVEN  # of the policy `relay`
    profile: Path | None = None  # that they were read from

    @property
    def relay_bands(self) -> ChosenBands:
        """Where the policy `relay` repairs, and where that comes from."""
        bands = self.policies["relay"].bands
        assert bands is not None
        fingerprint = self.fingerprint.partition(":")[0]  # without the numeric type
        return ChosenBands(bands, self.bands_source, fingerprint, self.profile)


def prepare(options: EngineOptions) -> EngineParts:
    """Loads the model and settles every size. Raises what `load_engine` lists."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    kernels = choose_kernels(device)
    name = default_model_name if options.model == "default" else options.model
    folder = resolve_model(name)
    model = load_model(folder, dtype, device, kernels)
    fingerprint = model_fingerprint(model.config, model.final_norm)
    chosen = choose_relay_bands(options, model.config.num_layers, fingerprint)
    policies = builtin_policies(model.config.num_layers, chosen.bands)
    find_policy(policies, options.relay_policy, model.config.num_layers)  # or an error says why
    config = device_config(options, device)
    cache = choose_cache(options, model, config)
    max_model_len = choose_max_model_len(options, model.config, cache)
    tokenizer = Tokenizer.from_folder(folder)
    return EngineParts(
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        fingerprint=f"{fingerprint}:{dtype}",
        policies=policies,
        hidden_layer=chosen.bands.inject,
        cache=cache,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=choose_step_tokens(options, device),
            max_num_requests=options.max_num_requests,
            max_model_len=max_model_len,
        ),
        relay=RelayConfig(
            default_policy=options.relay_policy,
            anchor_share=options.anchor_share,
            shadow_rate=options.shadow_rate,
            shadow_bound=options.shadow_bound,
            num_offsets=options.learned_memory_bytes // OffsetMemory.bytes_per_mean(model.config),
        ),
        device=config,
        bands_source=chosen.source,
        profile=chosen.path,
        card=ModelCard(
            name=options.served_model_name or (name if name != str(folder) else folder.name),
            max_model_len=max_model_len,
            # Logits may be padded beyond the tokens that exist.
            vocab_size=min(model.config.vocab_size, tokenizer.vocab_size),
            created=int(time.time()),
        ),
    )


def build_core(
    parts: EngineParts,
    attention: AttentionBackend[Any, Any] | None = None,
    capture: Capture | None = None,
) -> EngineCore:
    """Puts the three rings together.

    Args:
        attention: instead of the one that fits the device.
        capture: how decode steps become graphs, instead of the device's own way.
    """
    config, cache_config = parts.model.config, parts.cache
    grammars = GrammarMatchers(parts.tokenizer, config.vocab_size, config.eos_token_ids)
    runner = build_runner(
        parts.model,
        cache_config,
        parts.device,
        parts.hidden_layer,
        parts.scheduler.max_model_len,
        grammars,
        attention,
        capture,
        parts.relay.num_offsets,
    )
    pool = BlockPool(cache_config.num_blocks)
    prefix_cache = PrefixCache(pool, cache_config.block_size, parts.fingerprint)
    relay = parts.relay
    recordings = RecordingStore(pool, relay.min_segment_tokens)
    handoffs = HandoffSlots(relay.num_offsets) if relay.num_offsets >= NUM_LEVELS else None
    anchors = gate = None
    if relay.anchor_share:
        max_blocks = int(relay.anchor_share * cache_config.num_blocks)
        anchors = AnchorPools(pool, recordings, cache_config.block_size, max_blocks)
        gate = AnchorGate(anchors, runner, relay.anchor_entropy, relay.min_anchors)
    admission = Admission(
        pool,
        prefix_cache,
        recordings,
        cache_config.block_size,
        relay.min_segment_tokens,
        handoffs,
        gate,
    )
    scheduler = Scheduler(
        parts.scheduler,
        config.num_layers,
        cache_config.block_size,
        pool,
        prefix_cache,
        recordings,
        admission,
    )
    return EngineCore(
        runner=runner,
        tokenizer=parts.tokenizer,
        scheduler=scheduler,
        pool=pool,
        recordings=recordings,
        policies=parts.policies,
        relay=relay,
        eos_token_ids=frozenset(config.eos_token_ids),
        max_model_len=parts.scheduler.max_model_len,
        block_size=cache_config.block_size,
        bytes_per_block=cache_config.block_size
        * KVCache.bytes_per_token(config, parts.model.dtype),
        overlap=parts.device.overlap,
        lessons=HandoffLessons(scheduler, runner, handoffs, anchors),
        anchors=anchors,
    )


def choose_relay_bands(options: EngineOptions, num_layers: int, fingerprint: str) -> ChosenBands:
    """The bands of `relay`. Says in the log when they may not fit the model."""
    given = None if options.profile is None else Path(options.profile)
    chosen = choose_bands(given, fingerprint, num_layers)
    if chosen.source is BandsSource.DEFAULT:
        _log.warning(
            "no relay profile for this model (fingerprint %s): relay uses the safe bands "
            "inject %d, select %d, stop %d; `relaykv profile` finds better ones",
            fingerprint,
            chosen.bands.inject,
            chosen.bands.select,
            chosen.bands.stop,
        )
    elif chosen.made_for != fingerprint:
        _log.warning("the profile %s was made for another model", chosen.path)
    return chosen
