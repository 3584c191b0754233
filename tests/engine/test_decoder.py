from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_forward import dense_logits
from tiny_models import FAMILIES, save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from relaykv.engine.loader import load_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, family, tied)
    ids = torch.randint(160, (100,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    logits = dense_logits(load_model(tmp_path, torch.float32, CPU), ids.tolist())
    assert expected.abs().max() > 1.0
    assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_near_fp32(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    ids = torch.randint(160, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    wide = dense_logits(load_model(tmp_path, torch.float32, CPU), ids)
    model = load_model(tmp_path, torch.bfloat16, CPU)
    narrow = dense_logits(model, ids)
    assert (model.dtype, narrow.dtype) == (torch.bfloat16, torch.float32)
    assert torch.nn.functional.cosine_similarity(wide, narrow).min() > 0.99


def test_a_row_does_not_depend_on_the_other_rows(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    model = load_model(tmp_path, torch.float32, CPU)
    ids, positions = torch.tensor([3, 1, 4]), torch.tensor([7, 100, 2])
    q, k, v = model.project_qkv(1, model.embed(ids), *model.rope(positions))
    assert (q.shape, k.shape, v.shape) == ((3, 4, 32), (3, 2, 32), (3, 2, 32))
    alone = model.project_qkv(1, model.embed(ids[1:2]), *model.rope(positions[1:2]))
    for together, single in zip((q, k, v), alone, strict=True):
        torch.testing.assert_close(together[1:2], single)


@pytest.mark.model
def test_the_default_model_equals_transformers_on_64_tokens(default_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    text = "The river was low that summer, and the ferry had stopped. " * 8
    ids = tokenizer(text)["input_ids"][:64]
    reference = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    logits = dense_logits(load_model(default_model_dir, torch.float32, CPU), ids)
    assert len(ids) == 64
    assert (logits - expected).abs().max() <= 1e-3
    narrow = dense_logits(load_model(default_model_dir, torch.bfloat16, CPU), ids)
    assert (narrow.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.9
