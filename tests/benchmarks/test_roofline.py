from __future__ import annotations

from pathlib import Path

import pytest
import roofline

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_the_document_holds_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main([]) == 0
    printed = capsys.readouterr().out
    assert "| H200 | 5 | 8784 |" in printed
    text = DOCUMENT.read_text(encoding="utf-8")
    assert printed.strip() in text, "run python benchmarks/roofline.py and renew docs/gpu.md"


def test_a_slower_host_takes_from_the_gain_of_a_small_model_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ratios(layer_us: str) -> list[str]:
        roofline.main(["--layer-us", layer_us])
        lines = capsys.readouterr().out.splitlines()
        return [line.split(" | ")[8] for line in lines if line.startswith("| H200 | 5 ")]

    free, slow = ratios("0"), ratios("100")
    assert free[0].split()[0] == slow[0].split()[0]

    def with_host(cell: str) -> float:
        return float(cell.split("(")[1].rstrip(")"))

    assert with_host(slow[0]) < 0.8 * with_host(free[0])  # Qwen3-0.6B
    assert with_host(slow[1]) > 0.98 * with_host(free[1])  # Llama-3.1-8B
