from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tiny_models import save_tiny_model

from relaykv.engine.loader import load_model
from relaykv.engine.models.fingerprint import model_fingerprint

CPU = torch.device("cpu")


def test_it_names_the_model_and_not_the_dtype(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    wide = load_model(tmp_path, torch.float32, CPU)
    narrow = load_model(tmp_path, torch.bfloat16, CPU)
    name = model_fingerprint(wide.config, wide.final_norm)
    assert name == model_fingerprint(narrow.config, narrow.final_norm)
    assert len(name) == 16
    assert int(name, 16) >= 0


def test_architecture_and_weights_count_and_the_context_length_does_not(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    name = model_fingerprint(model.config, model.final_norm)
    assert model_fingerprint(replace(model.config, max_model_len=64), model.final_norm) == name
    assert model_fingerprint(replace(model.config, qk_norm=True), model.final_norm) != name
    assert model_fingerprint(model.config, model.final_norm * 1.5) != name
