from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_shapes import ModelShape, toy_llama, toy_qwen3
from phase_costs import num_parameters
from random_model import CoreSizes, core_parts, random_ids, random_model, request, serve, tokens_of

from relaykv.engine.assembly import build_core
from relaykv.engine.config import DeviceConfig
from relaykv.engine.models.decoder import DecoderModel

CPU = torch.device("cpu")


def model_of(shape: ModelShape, seed: int = 0) -> DecoderModel:
    return random_model(shape, torch.float32, CPU, seed=seed)


def num_elements(model: DecoderModel) -> int:
    matrices = [model._embedding]
    if model._head is not model._embedding:
        matrices.append(model._head)
    for layer in model._layers:
        matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
    return sum(matrix.numel() for matrix in matrices)


@pytest.mark.parametrize("shape", [toy_llama(), toy_qwen3()])
def test_it_has_the_parameters_that_the_costs_are_counted_with(shape: ModelShape) -> None:
    model = model_of(shape)
    assert num_elements(model) == num_parameters(shape.config)
    assert (model._head is model._embedding) == shape.config.tie_word_embeddings
    assert (model._layers[0].q_norm is not None) == shape.config.qk_norm


def test_the_same_seed_gives_the_same_weights() -> None:
    one, same, other = (model_of(toy_llama(), seed) for seed in (0, 0, 1))
    assert torch.equal(one._layers[3].down, same._layers[3].down)
    assert not torch.equal(one._layers[3].down, other._layers[3].down)


def test_logits_are_neither_flat_nor_certain() -> None:
    shape = toy_llama()
    shape = replace(shape, config=replace(shape.config, hidden_size=256))
    model = model_of(shape)
    hidden = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert model.logits(hidden).std().item() == pytest.approx(2.0, rel=0.1)


def test_an_engine_around_it_answers_at_full_length_with_many_tokens() -> None:
    shape = toy_qwen3()
    parts = core_parts(model_of(shape), shape, CoreSizes(200, 400), DeviceConfig())
    core = build_core(parts)
    prompt = random_ids("prompt", 40, shape.config.vocab_size)
    outputs = serve(core, request("r", prompt, 60, temperature=1.0, seed=3))["r"]
    assert len(tokens_of(outputs)) == 60
    assert len(set(tokens_of(outputs))) > 40  # it does not fall into a loop
    assert outputs[-1].usage.num_prompt_tokens == 40


def test_ids_depend_on_their_name_alone() -> None:
    assert random_ids("a", 50, 1000) == random_ids("a", 50, 1000)
    assert random_ids("a", 50, 1000) != random_ids("b", 50, 1000)
    assert all(0 <= token < 7 for token in random_ids("c", 200, 7))
