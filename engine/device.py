"""Chooses a device, and what fits it: type, kernels, attention, and how steps are run."""

from __future__ import annotations

from typing import Any, cast

import torch

from relaykv.engine.config import CacheConfig, DeviceConfig
from relaykv.engine.decode_graphs import (
    Capture,
    DecodeGraphs,
    GraphAttention,
    capture_on_cuda,
    graph_sizes,
)
from relaykv.engine.grammar import GrammarMatchers
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.options import EngineOptions
from relaykv.kernels.attention import AttentionBackend
from relaykv.kernels.attention_torch import TorchAttention
from relaykv.kernels.kernel_set import KernelSet, cuda_kernels, torch_kernels

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(name: str) -> torch.device:
    """The device that an option names.

    Raises:
        ValueError: there is no such device here, or none of its kind can be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this torch finds no CUDA device; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no {name}: {torch.cuda.device_count()} CUDA devices are here")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of weights and KV cache.

    Raises:
        ValueError: the type is unknown, or the device's attention does not have it.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; use one of auto, {', '.join(_DTYPES)}")
    if device.type == "cuda" and name == "float32":
        raise ValueError("attention on a GPU needs bfloat16 or float16, not float32")
    return _DTYPES[name]


def choose_kernels(device: torch.device) -> KernelSet:
    """Raises ValueError where a GPU's kernels are not installed."""
    if device.type == "cpu":
        return torch_kernels()
    try:
        return cuda_kernels()
    except ImportError as error:
        raise ValueError(f"a GPU needs the extra: pip install 'relaykv[cuda]' ({error})") from error


def choose_attention(
    model: DecoderModel, block_size: int, config: DeviceConfig
) -> AttentionBackend[Any, Any]:
    """Attention that fits the model's device."""
    shape = (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim)
    if model.device.type == "cpu":
        return TorchAttention(*shape, block_size, model.dtype)
    from relaykv.kernels.attention_flashinfer import FlashInferAttention

    return FlashInferAttention(
        *shape,
        block_size,
        model.dtype,
        model.device,
        deterministic=config.deterministic,
        stock_module=config.stock_attention,
        add_influence=model.kernels.add_influence,
    )


def build_runner(
    model: DecoderModel,
    cache_config: CacheConfig,
    config: DeviceConfig,
    hidden_layer: int,
    max_model_len: int,
    grammars: GrammarMatchers | None,
    attention: AttentionBackend[Any, Any] | None,
    capture: Capture | None = None,
    num_offsets: int = 0,
) -> ModelRunner:
    """Allocates the KV cache and puts a runner around it.

    Args:
        hidden_layer: the layer whose input is kept beside the KV.
        attention: None: what fits the device.
        capture: how decode steps become graphs; None: as CUDA graphs.
        num_offsets: room for mean offsets of recurring hand-offs.
    """
    cache = KVCache(model.config, cache_config, model.dtype, model.device)
    attention = attention or choose_attention(model, cache_config.block_size, config)
    runner = ModelRunner(model, cache, attention, hidden_layer, grammars, config, num_offsets)
    if config.graph_sizes:
        graphs = DecodeGraphs(
            runner.forward_pass,
            cast(GraphAttention, attention),
            cache,
            runner.staging,
            config.graph_sizes,
            max_blocks=-(-max_model_len // cache_config.block_size),
            capture=capture or capture_on_cuda(),
        )
        runner.use_graphs(graphs)
    return runner


def device_config(options: EngineOptions, device: torch.device) -> DeviceConfig:
    """How steps are run there."""
    if device.type == "cpu":
        return DeviceConfig()
    return DeviceConfig(
        overlap=options.overlap,
        graph_sizes=graph_sizes(options.max_num_requests) if options.cuda_graphs else (),
        deterministic=options.deterministic,
        stock_attention=options.stock_attention,
        influence_layer_stride=4,
        influence_step_stride=2,
    )
