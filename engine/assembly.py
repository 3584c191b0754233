"""Builds the engine's parts from options: the only place that knows all three rings."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from relaykv.engine.admission import Admission
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.client import ModelCard
from relaykv.engine.config import CacheConfig, ModelConfig, RelayConfig, SchedulerConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.grammar import GrammarMatchers
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.loader import load_model, resolve_model
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.model_store import default_model_name
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.models.fingerprint import model_fingerprint
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Bands, Policy, builtin_policies
from relaykv.engine.prefix_cache import PrefixCache
from relaykv.engine.recording import RecordingStore
from relaykv.engine.relay_profile import default_bands, find_profile, read_profile
from relaykv.engine.scheduler import Scheduler
from relaykv.engine.tokenizer import Tokenizer
from relaykv.kernels.attention_torch import TorchAttention

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Without --kv-memory: a fifth of what is free now, within bounds that suit small machines.
_KV_MEMORY_SHARE = 0.2
_MAX_DEFAULT_KV_BYTES = 8 << 30


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


def prepare(options: EngineOptions) -> EngineParts:
    """Loads the model and settles every size. Raises what `load_engine` lists."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    if options.dtype not in _DTYPES:
        raise ValueError(f"dtype {options.dtype!r} is unknown; use one of {', '.join(_DTYPES)}")
    dtype = _DTYPES[options.dtype]
    name = default_model_name if options.model == "default" else options.model
    folder = resolve_model(name)
    model = load_model(folder, dtype, torch.device("cpu"))
    fingerprint = model_fingerprint(model.config, model.final_norm)
    bands = _relay_bands(options, model.config, fingerprint)
    policies = builtin_policies(model.config.num_layers, bands)
    if options.relay_policy not in policies:
        raise ValueError(
            f"relay policy {options.relay_policy!r} is unknown; use one of {', '.join(policies)}"
        )
    cache = _cache_config(options, model.config, dtype)
    max_model_len = _max_model_len(options, model.config, cache)
    tokenizer = Tokenizer.from_folder(folder)
    return EngineParts(
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        fingerprint=f"{fingerprint}:{options.dtype}",
        policies=policies,
        hidden_layer=bands.inject,
        cache=cache,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_requests=options.max_num_requests,
            max_model_len=max_model_len,
        ),
        relay=RelayConfig(default_policy=options.relay_policy),
        card=ModelCard(
            name=options.served_model_name or (name if name != str(folder) else folder.name),
            max_model_len=max_model_len,
            # Logits may be padded beyond the tokens that exist.
            vocab_size=min(model.config.vocab_size, tokenizer.vocab_size),
            created=int(time.time()),
        ),
    )


def build_core(parts: EngineParts) -> EngineCore:
    """Puts the three rings together."""
    config, cache_config = parts.model.config, parts.cache
    cache = KVCache(config, cache_config, parts.model.dtype, parts.model.device)
    attention = TorchAttention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        cache_config.block_size,
        parts.model.dtype,
    )
    grammars = GrammarMatchers(parts.tokenizer, config.vocab_size, config.eos_token_ids)
    runner = ModelRunner(parts.model, cache, attention, parts.hidden_layer, grammars)
    pool = BlockPool(cache_config.num_blocks)
    prefix_cache = PrefixCache(pool, cache_config.block_size, parts.fingerprint)
    relay = parts.relay
    recordings = RecordingStore(pool, relay.min_segment_tokens)
    admission = Admission(
        pool, prefix_cache, recordings, cache_config.block_size, relay.min_segment_tokens
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
        default_policy=relay.default_policy,
        eos_token_ids=frozenset(config.eos_token_ids),
        max_model_len=parts.scheduler.max_model_len,
        bytes_per_block=cache_config.block_size
        * KVCache.bytes_per_token(config, parts.model.dtype),
    )


def _relay_bands(options: EngineOptions, config: ModelConfig, fingerprint: str) -> Bands:
    if options.profile is not None:
        profile = read_profile(Path(options.profile), config.num_layers)
        if profile.fingerprint != fingerprint:
            _log.warning("the profile %s was made for another model", options.profile)
        return profile.bands
    shipped = find_profile(fingerprint, config.num_layers)
    if shipped is not None:
        return shipped.bands
    bands = default_bands(config.num_layers)
    _log.warning(
        "no relay profile for this model (fingerprint %s); using the safe bands "
        "inject %d, select %d, stop %d",
        fingerprint,
        bands.inject,
        bands.select,
        bands.stop,
    )
    return bands


def _cache_config(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> CacheConfig:
    num_bytes = options.kv_memory_bytes
    if num_bytes is None:
        available = psutil.virtual_memory().available
        num_bytes = min(int(available * _KV_MEMORY_SHARE), _MAX_DEFAULT_KV_BYTES)
    block_size = CacheConfig(1).block_size
    num_blocks = num_bytes // (block_size * KVCache.bytes_per_token(config, dtype))
    if num_blocks < 2:
        raise ValueError(f"{num_bytes} bytes of KV memory hold less than two blocks of this model")
    return CacheConfig(num_blocks, block_size)


def _max_model_len(options: EngineOptions, config: ModelConfig, cache: CacheConfig) -> int:
    wanted = options.max_model_len or config.max_model_len
    if wanted > config.max_model_len:
        raise ValueError(f"max model length {wanted} is above the model's {config.max_model_len}")
    if wanted > cache.num_slots:
        if options.max_model_len is not None:
            raise ValueError(
                f"a request of {wanted} tokens does not fit into KV memory for {cache.num_slots}"
            )
        _log.warning("KV memory holds %d tokens: requests are limited to that", cache.num_slots)
        return cache.num_slots
    return wanted
