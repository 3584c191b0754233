"""Builds the scattered variant with nvcc, where there need be no GPU, and says what came of it.

    python build_variant.py HEAD_DIM DTYPE

prints the path of the library. FlashInfer takes its settings from the environment when it is
imported, so this is a program of its own: FLASHINFER_CUDA_ARCH_LIST, FLASHINFER_WORKSPACE_BASE,
CUDA_HOME, MAX_JOBS and FLASHINFER_EXTRA_LDFLAGS.
"""

from __future__ import annotations

import sys

import torch
from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module

from relaykv.kernels.scattered_causal import (
    scattered_causal_jit_args,
    scattered_causal_jit_kwargs,
)


def main() -> None:
    head_dim, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    spec = gen_customize_batch_prefill_module(
        "fa2", *scattered_causal_jit_args(dtype, head_dim), **scattered_causal_jit_kwargs()
    )
    spec.build()
    print(spec.get_library_path())


if __name__ == "__main__":
    main()
