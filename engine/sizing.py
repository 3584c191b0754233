"""Settles how much KV cache there is and how long a request may be."""

from __future__ import annotations

import logging
from dataclasses import replace

import psutil
import torch

from relaykv.engine.batch import SamplingRow, ScheduledBatch, ScheduledRequest
from relaykv.engine.config import CacheConfig, DeviceConfig, ModelConfig
from relaykv.engine.device import build_runner
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.memory import CudaMemory, kv_memory_bytes
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.options import EngineOptions
from relaykv.engine.request import SamplingParams

_log = logging.getLogger(__name__)
# On a CPU without --kv-memory: a fifth of what is free now, within bounds that suit small ones.
_KV_MEMORY_SHARE = 0.2
_MAX_DEFAULT_KV_BYTES = 8 << 30
_STEP_TOKENS_ON_CPU = 512
_STEP_TOKENS_ON_GPU = 8192


def choose_cache(options: EngineOptions, model: DecoderModel, config: DeviceConfig) -> CacheConfig:
    """As many blocks as the memory for KV holds: given, or found out.

    On a GPU the largest step is run in any case: it also compiles what the first steps need.

    Raises:
        ValueError: not even two blocks, or more is given than a GPU has left.
    """
    num_bytes = options.kv_memory_bytes
    if model.device.type == "cuda":
        memory = CudaMemory(model.device)
        found = kv_memory_bytes(
            memory, options.gpu_memory_share, lambda: run_largest_step(options, model, config)
        )
        if num_bytes is not None and num_bytes > found:
            raise ValueError(
                f"{num_bytes} bytes of KV memory are more than the {found} that "
                f"{options.gpu_memory_share:.0%} of the device's memory leave beside the model"
            )
        num_bytes = num_bytes or found
    elif num_bytes is None:
        available = psutil.virtual_memory().available
        num_bytes = min(int(available * _KV_MEMORY_SHARE), _MAX_DEFAULT_KV_BYTES)
    block_size = CacheConfig(1).block_size
    num_blocks = num_bytes // (block_size * KVCache.bytes_per_token(model.config, model.dtype))
    if num_blocks < 2:
        raise ValueError(f"{num_bytes} bytes of KV memory hold less than two blocks of this model")
    return CacheConfig(num_blocks, block_size)


def choose_max_model_len(options: EngineOptions, config: ModelConfig, cache: CacheConfig) -> int:
    """Tokens of one request: what is asked for, else what model and cache allow.

    Raises:
        ValueError: more is asked for than that.
    """
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


def choose_step_tokens(options: EngineOptions, device: torch.device) -> int:
    """Rows that one step computes: enough to keep the device busy, few enough for decodes."""
    default = _STEP_TOKENS_ON_CPU if device.type == "cpu" else _STEP_TOKENS_ON_GPU
    return options.max_num_batched_tokens or default


def run_largest_step(options: EngineOptions, model: DecoderModel, config: DeviceConfig) -> None:
    """Runs a prefill of a whole step's budget and a full batch that samples, on a small cache.

    Sampling with top-p on all rows takes the most memory of all ways to sample.
    """
    num_tokens = choose_step_tokens(options, model.device)
    num_rows = options.max_num_requests
    block_size = CacheConfig(1).block_size
    cache = CacheConfig(max(-(-num_tokens // block_size), num_rows), block_size)
    without_graphs = replace(config, graph_sizes=())
    runner = build_runner(model, cache, without_graphs, 0, cache.num_slots, None, None)
    blocks = tuple(range(cache.num_blocks))
    runner.execute(ScheduledBatch((_request("prefill", num_tokens, blocks),), ()))
    rows = tuple(_request(f"row {i}", 1, (i,)) for i in range(num_rows))
    runner.execute(ScheduledBatch(rows, ()))


def _request(request_id: str, num_tokens: int, block_ids: tuple[int, ...]) -> ScheduledRequest:
    sampling = SamplingRow(SamplingParams(1, temperature=1.0, top_p=0.9), 0, (), (), request_id)
    return ScheduledRequest(
        request_id=request_id,
        start=0,
        stop=num_tokens,
        token_ids=(0,) * num_tokens,
        block_ids=block_ids,
        relay_spans=(),
        counts_influence=False,
        sampling=sampling,
    )
