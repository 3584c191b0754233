"""Configuration of the engine: given by the command line, never found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding whose angles are linear in the position.

    Only such embeddings can be relayed: a key moves by a rotation that depends on the shift
    alone. `llama3_*` is the frequency scaling of Llama 3.1 (static, so still linear).
    """

    theta: float
    rotary_dim: int  # leading dimensions of a head that rotate
    llama3_factor: float | None = None  # None: plain RoPE
    llama3_low_freq_factor: float = 1.0
    llama3_high_freq_factor: float = 4.0
    llama3_original_max_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only model of the Llama kind."""

    family: str  # "llama", "qwen2", "qwen3" or "mistral"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    attention_out_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size of the KV cache."""

    num_blocks: int
    block_size: int = 16  # tokens

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one request."""

    max_num_batched_tokens: int = 512  # row-equivalents a step computes, decodes included
    max_num_requests: int = 32  # running at the same time
    max_model_len: int = 8192  # prompt and answer together


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """How text is found again and what a session does by default."""

    default_policy: str = "auto"  # for requests that name a session and no policy
    min_segment_tokens: int = 32  # shorter matches are computed, not relayed
    anchor_share: float = 0.25  # of the KV cache's blocks that anchors of hand-offs may hold
    anchor_entropy: float = 0.3  # gamma of KVCOMM's gate, see anchor_pools.judge_anchors
    min_anchors: int = 5  # that correct a segment; fewer do more harm than good
    shadow_rate: float = 0.0  # share of relayed requests that are computed in full when idle
    shadow_bound: float = 0.05  # mean divergence in nats above which a policy is given up
    num_offsets: int = 0  # keys of recurring hand-offs that are learned at the same time; 0: none


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """How the device is driven. The defaults suit a CPU."""

    overlap: bool = False  # schedule the next step while one is running
    graph_sizes: tuple[int, ...] = ()  # numbers of decode rows that get a graph
    deterministic: bool = False  # results do not depend on what else is in the batch
    stock_attention: bool = False  # FlashInfer's own modules only, no mask variant
    # Attention received is added up on every n-th layer of every n-th step: it costs as much
    # as reading the keys once more.
    influence_layer_stride: int = 1
    influence_step_stride: int = 1
