from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from tiny_core import tiny_model

from relaykv.engine.config import CacheConfig, DeviceConfig, ModelConfig
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.options import EngineOptions
from relaykv.engine.sizing import (
    choose_cache,
    choose_max_model_len,
    choose_step_tokens,
    run_largest_step,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@dataclass
class ModelOnGPU:
    """As much of a model as sizing looks at."""

    config: ModelConfig = field(default_factory=lambda: tiny_model().config)
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA


def _on_gpu(monkeypatch: pytest.MonkeyPatch, found_bytes: int) -> list[str]:
    """A GPU with that much memory left; the trial runs, as they take place."""
    trials: list[str] = []

    def measure(_memory: object, share: float, trial: object) -> int:
        assert callable(trial)
        trials.append(f"{share:.2f}")
        return found_bytes

    monkeypatch.setattr("relaykv.engine.sizing.kv_memory_bytes", measure)
    return trials


def _block_bytes(dtype: torch.dtype) -> int:
    return 16 * KVCache.bytes_per_token(tiny_model().config, dtype)


def _cache(model: object, **options: int | None) -> CacheConfig:
    assert isinstance(model, DecoderModel | ModelOnGPU)
    settings = EngineOptions(**options)  # type: ignore[arg-type]
    return choose_cache(settings, model, DeviceConfig())  # type: ignore[arg-type]


def test_given_memory_becomes_whole_blocks() -> None:
    size = _block_bytes(torch.float32)

    assert _cache(tiny_model(), kv_memory_bytes=10 * size + size // 2).num_blocks == 10


def test_memory_for_less_than_two_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="less than two blocks"):
        _cache(tiny_model(), kv_memory_bytes=_block_bytes(torch.float32))


def test_a_gpu_gets_what_the_trial_run_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = _on_gpu(monkeypatch, 33 * _block_bytes(torch.bfloat16))

    assert _cache(ModelOnGPU()).num_blocks == 33
    assert trials == ["0.90"]


def test_given_memory_of_a_gpu_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    size = _block_bytes(torch.bfloat16)
    trials = _on_gpu(monkeypatch, 33 * size)

    assert _cache(ModelOnGPU(), kv_memory_bytes=5 * size).num_blocks == 5
    assert len(trials) == 1
    with pytest.raises(ValueError, match="leave beside the model"):
        _cache(ModelOnGPU(), kv_memory_bytes=34 * size)


def test_a_gpu_that_does_not_even_hold_the_model_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _on_gpu(monkeypatch, -5)

    with pytest.raises(ValueError, match="less than two blocks"):
        _cache(ModelOnGPU())


def test_the_largest_step_runs_on_a_cache_of_its_own() -> None:
    options = EngineOptions(max_num_batched_tokens=70, max_num_requests=9)

    run_largest_step(options, tiny_model(), DeviceConfig(graph_sizes=(1, 2)))


def test_the_budget_of_a_step_follows_the_device_unless_it_is_given() -> None:
    assert choose_step_tokens(EngineOptions(), CPU) == 512
    assert choose_step_tokens(EngineOptions(), CUDA) == 8192
    assert choose_step_tokens(EngineOptions(max_num_batched_tokens=100), CUDA) == 100


def test_a_request_may_be_as_long_as_model_and_cache_allow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny_model().config

    assert choose_max_model_len(EngineOptions(), config, CacheConfig(1000)) == config.max_model_len
    assert choose_max_model_len(EngineOptions(), config, CacheConfig(4)) == 64
    assert "limited" in caplog.text


def test_a_length_that_model_or_cache_do_not_allow_is_refused() -> None:
    config = tiny_model().config
    too_long = EngineOptions(max_model_len=config.max_model_len + 1)

    with pytest.raises(ValueError, match="above the model's"):
        choose_max_model_len(too_long, config, CacheConfig(1000))
    with pytest.raises(ValueError, match="does not fit"):
        choose_max_model_len(EngineOptions(max_model_len=65), config, CacheConfig(4))
