"""A tiny random model that attends at every layer and whose answers are read back as written."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from planted_model import planted_parts
from tiny_models import tiny_model

from relaykv.engine.assembly import EngineParts
from relaykv.engine.loader import load_model
from relaykv.engine.models.decoder import DecoderModel

_PRINTABLE = slice(3, 98)  # of the byte tokenizer


def readable_parts() -> EngineParts:
    """Parts of that model, with the byte tokenizer of planted models and their sizes."""
    return planted_parts(readable_model())


@cache
def readable_model() -> DecoderModel:
    """Three layers; its answers go on for ever and hold nothing but printable characters."""
    model = tiny_model("llama")
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    printable = torch.zeros(head.weight.shape[0], 1)
    printable[_PRINTABLE] = 1.0  # the largest of their logits is above 0, which all others have
    with torch.no_grad():
        head.weight *= printable
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_model(Path(folder), torch.float32, torch.device("cpu"))
