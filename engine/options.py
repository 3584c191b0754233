"""What a user decides when starting an engine: the command line's values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one engine. None leaves the choice to the engine (from model and machine)."""

    model: str = "default"  # "default", a Hugging Face folder or a hub id
    served_model_name: str | None = None  # None: the model's own name
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto": a GPU when there is one
    dtype: str = "auto"  # "float32", "bfloat16", "float16"; "auto": by the device
    max_model_len: int | None = None  # tokens of prompt and answer together
    kv_memory_bytes: int | None = None
    max_num_batched_tokens: int | None = None  # rows that one step computes; None: by the device
    max_num_requests: int = 32  # running at the same time
    relay_policy: str = "auto"  # for requests that name a session and no policy
    learned_memory_bytes: int = 64 << 20  # for what recurring hand-offs have in common; 0: nothing
    shadow_rate: float = 0.0  # share of relayed requests computed in full too, when idle
    shadow_bound: float = 0.05  # nats from full answers at which the default policy is given up
    anchor_share: float = 0.25  # of the KV cache, for the anchors of the policy kvcomm; 0: none
    profile: str | None = None  # file with the model's relay bands; None: the shipped one
    num_threads: int | None = None  # None: torch decides
    # On a GPU only:
    gpu_memory_share: float = 0.9  # of the whole device, for weights, activations and KV cache
    cuda_graphs: bool = True  # run decode steps as graphs
    overlap: bool = True  # schedule the next step while one is running
    deterministic: bool = False  # attention that does not depend on what else is in the batch
    stock_attention: bool = False  # only FlashInfer's own modules; no compiler is needed for more
