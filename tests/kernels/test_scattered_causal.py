"""The attention variant of scattered rows: what its mask says, and that nvcc compiles it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relaykv.kernels.scattered_causal import (
    VARIANT_DECLARATION,
    VARIANT_NAME,
    scattered_causal_jit_args,
)

# The variant's own text, compiled for the host: what surrounds it on a device is stood in for,
# except FlashInfer's macro, which is put in from the installed header.
_HARNESS = r"""
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#define __device__
#define __host__
#define __forceinline__ inline
namespace math { constexpr float log2e = 1.44269504088896340736f; }
struct AttentionVariantBase {};
MACRO
VARIANT

// Ends the program where a device would read beyond the positions.
struct Positions {
  int32_t values[7] = {0, 3, 4, 18, 19, 2, 15};
  int32_t operator[](uint32_t row) const {
    if (row >= 7) abort();
    return values[row];
  }
};
struct Params {
  uint32_t q_indptr[3] = {0, 5, 7};
  uint32_t kv_lens[2] = {20, 16};
  double sm_scale = 0.125;
  Positions q_pos;
  uint32_t get_qo_len(uint32_t batch) const { return q_indptr[batch + 1] - q_indptr[batch]; }
  uint32_t get_kv_len(uint32_t batch) const { return kv_lens[batch]; }
};

int main() {
  Params params;
  for (uint32_t batch = 0; batch < 2; ++batch) {
    NAME variant(params, batch, nullptr);
    printf("%u %u %u %.6f\n", variant.qo_len, variant.kv_len, variant.window_left,
           variant.sm_scale_log2);
    for (uint32_t row = 0; row < 128; ++row) {  // a whole tile, mostly padding
      for (uint32_t key = 0; key < params.get_kv_len(batch); ++key)
        printf("%d", int(variant.LogitsMask(params, batch, row, key, 0, 0)));
      printf("\n");
    }
  }
}
"""


def test_another_text_type_or_dimension_has_another_name() -> None:
    arguments = [
        scattered_causal_jit_args(dtype, head_dim)
        for dtype in (torch.float16, torch.bfloat16)
        for head_dim in (64, 128)
    ]
    assert len({one[0] for one in arguments}) == 4
    assert all(re.fullmatch(r"\w+", one[0]) for one in arguments)


@pytest.mark.usefixtures("flashinfer_installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_mask_shows_keys_up_to_a_rows_position_and_reads_no_other_rows(tmp_path: Path) -> None:
    import flashinfer

    headers = Path(flashinfer.__file__).parent / "data/include/flashinfer/attention"
    text = (headers / "variant_helper.cuh").read_text(encoding="utf-8")
    macro = re.search(r"#define REGISTER_LOGITS_MASK\((?:.*\\\n)*.*\n", text)
    assert macro is not None
    source = _HARNESS.replace("MACRO", macro[0]).replace("VARIANT", VARIANT_DECLARATION)
    (tmp_path / "harness.cpp").write_text(source.replace("NAME", VARIANT_NAME), encoding="utf-8")
    subprocess.run(
        ["g++", "-std=c++17", "-Wall", "-Wno-unused-but-set-parameter", "harness.cpp", "-o", "run"],
        cwd=tmp_path,
        check=True,
    )
    result = subprocess.run(["./run"], cwd=tmp_path, check=True, capture_output=True, text=True)
    lines = iter(result.stdout.splitlines())
    scale = 0.125 * 1.442695
    for num_keys, positions in ((20, [0, 3, 4, 18, 19]), (16, [2, 15])):
        qo_len, kv_len, window_left, sm_scale_log2 = next(lines).split()
        # A window as long as the keys: the kernel's traversal leaves none of them out.
        assert (int(qo_len), int(kv_len)) == (len(positions), num_keys)
        assert int(window_left) == num_keys
        assert float(sm_scale_log2) == pytest.approx(scale, abs=1e-5)
        for row in range(128):
            seen = positions[min(row, len(positions) - 1)] + 1
            assert next(lines) == "1" * seen + "0" * (num_keys - seen)


@pytest.mark.jit
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("flashinfer_installed", "triton_installed")
def test_nvcc_builds_the_variant_for_sm_90a(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "jit" not in request.config.option.markexpr:
        pytest.skip("opt-in, as it takes minutes and nvcc: make jit")
    # Without a driver there is nothing to link with; the library is not run here.
    command = ["g++", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", "/dev/null"]
    subprocess.run([*command, "-o", tmp_path / "libcuda.so"], check=True)
    result = subprocess.run(
        [sys.executable, Path(__file__).parent / "build_variant.py", "64", "bfloat16"],
        env={
            "MAX_JOBS": str(os.cpu_count() or 1),
            **os.environ,
            "CUDA_HOME": _cuda_home(),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
            "FLASHINFER_EXTRA_LDFLAGS": f"-L{tmp_path}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    library = Path(result.stdout.splitlines()[-1])
    names = subprocess.run(["nm", "-D", library], check=True, capture_output=True, text=True).stdout
    for function in ("plan", "paged_run"):
        assert f"__tvm_ffi_{function}" in names
    spilled = _spilled_bytes(library, 64)
    assert {tile for tile, _ in spilled} == {16, 64, 128}
    assert not any(spilled.values()), spilled


def _cuda_home() -> str:
    """The toolkit of the nvcc on the path, which may be a script that calls another one."""
    if "CUDA_HOME" in os.environ:
        return os.environ["CUDA_HOME"]
    command = ["nvcc", "-v", "--dryrun", "-x", "cu", "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.*)$", result.stderr, re.MULTILINE)
    assert top is not None, result.stderr
    return str(Path(top[1]).resolve())


def _spilled_bytes(library: Path, head_dim: int) -> dict[tuple[int, int], int]:
    """Local memory of the kernels with pages and masks of one's own that an H100 may launch.

    More are compiled: a launch holds as many tiles of 16 keys as prefill.cuh's
    BatchPrefillWithPagedKVCacheDispatched finds to fit, up to 8 with 16 query rows a warp.

    Returns:
        Bytes by rows of a tile and number of tiles of keys.
    """
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    result = subprocess.run(
        [program, "-res-usage", library], check=True, capture_output=True, text=True
    )
    traits = "ELj".join([r"MaskModeE2", *[r"(\d+)"] * 7])
    found = re.findall(
        rf"Function \w*PagedKVCacheKernel\w*{traits}\w*{VARIANT_NAME}\w*:\s+REG:\d+ STACK:(\d+)",
        result.stdout,
    )
    spilled = {}
    for tile, mma_q, mma_kv, _, _, _, warps_kv, stack in (map(int, one) for one in found):
        # Two blocks share the 228 KiB of a multiprocessor.
        free = 228 * 1024 // 2 - tile * head_dim * 2
        fits = free // (2 * head_dim * 16 * warps_kv * 2)
        if mma_kv <= min(8 // mma_q, fits):
            spilled[tile, mma_kv] = stack
    return spilled
