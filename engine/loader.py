"""Loads a Hugging Face model folder into a `DecoderModel`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from relaykv.engine.config import ModelConfig
from relaykv.engine.model_store import default_model_name, pull_default_model
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.models.families import model_config_from_hf
from relaykv.engine.models.layers import LayerWeights
from relaykv.kernels.kernel_set import KernelSet

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_FLOAT_TYPES = ("F32", "F16", "BF16")


class ModelLoadError(RuntimeError):
    """The model's files are missing, damaged or do not fit its config; one line says which."""


def resolve_model(name: str) -> Path:
    """Finds a model's folder: an existing directory, the default model's name, or a hub id.

    Raises:
        ModelLoadError: no such directory, or the hub does not answer or lacks the model.
        ModelStoreError: the default model cannot be fetched.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name == default_model_name:
        return pull_default_model()
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelLoadError(f"{name!r} is neither a directory nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError, RuntimeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"cannot fetch {name!r} from the model hub: {why}") from error


def read_model_config(path: Path) -> ModelConfig:
    """Reads config.json and, when there is one, generation_config.json.

    Raises:
        ModelLoadError: config.json is missing, or one of the two is not a JSON object.
        UnsupportedModelError: the model is of a kind that is not served.
    """
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    return model_config_from_hf(config, _read_json(generation) if generation.is_file() else None)


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device, kernels: KernelSet | None = None
) -> DecoderModel:
    """Loads weights from safetensors, one file or sharded with an index.

    Args:
        path: a Hugging Face model folder.
        dtype: fp32, bf16 or fp16; the weights are cast to it.
        device: where the weights go.
        kernels: fit for that device; None: plain torch.

    Raises:
        ModelLoadError: a tensor is missing, left over, of the wrong shape or not a float; or
            there are no safetensors at all.
        UnsupportedModelError: the model is of a kind that is not served.
    """
    config = read_model_config(path)
    with contextlib.ExitStack() as stack:
        weights = _Checkpoint(path, stack, dtype, device)
        weights.check(_expected_shapes(config), config.tie_word_embeddings)
        embedding = weights.tensor("model.embed_tokens.weight")
        tied = config.tie_word_embeddings
        return DecoderModel(
            config=config,
            embedding=embedding,
            layers=tuple(_layer(weights, config, i) for i in range(config.num_layers)),
            final_norm=weights.tensor("model.norm.weight"),
            head=embedding if tied else weights.tensor("lm_head.weight"),
            kernels=kernels,
        )


class _Checkpoint:
    """The tensors of a folder's safetensors files by name, read when asked for."""

    def __init__(
        self,
        path: Path,
        stack: contextlib.ExitStack,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._device = device
        self._files: dict[str, Any] = {}
        for file in _weight_files(path):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except Exception as error:  # safetensors raises its own type, and OSError
                raise ModelLoadError(f"cannot read {file}: {error}") from error
            self._files.update(dict.fromkeys(handle.keys(), handle))

    def check(self, expected: Mapping[str, tuple[int, ...]], tied: bool) -> None:
        for name, shape in expected.items():
            if name not in self._files:
                raise ModelLoadError(f"{self._path}: tensor {name} is missing")
            found = self._files[name].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise ModelLoadError(
                    f"{self._path}: tensor {name} has shape {tuple(found.get_shape())}, "
                    f"config.json asks for {shape}"
                )
            if found.get_dtype() not in _FLOAT_TYPES:
                raise ModelLoadError(
                    f"{self._path}: tensor {name} is {found.get_dtype()}; "
                    f"supported: {', '.join(_FLOAT_TYPES)}"
                )
        for name in self._files:
            harmless = name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
            if name not in expected and not harmless:
                raise ModelLoadError(f"{self._path}: unexpected tensor {name}")

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(self._device, self._dtype)

    def joined(self, names: tuple[str, ...]) -> Tensor:
        return torch.cat([self.tensor(name) for name in names])


def _weight_files(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map", {})
        files = [path / name for name in sorted(set(weight_map.values()))]
    else:
        files = [single]
    missing = [file for file in files if not file.is_file()]
    if not missing and files:
        return files
    if any(path.glob("pytorch_model*.bin")):
        raise ModelLoadError(
            f"{path} holds pickled weights (pytorch_model*.bin), which can run code when loaded; "
            "save the model as safetensors"
        )
    raise ModelLoadError(f"{path} has no {missing[0].name if missing else single.name}")


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's name in the file and its shape."""
    d, f, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, d),
        "model.norm.weight": (d,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    linear = (  # name, output size, input size, whether it has a bias
        ("self_attn.q_proj", q, d, config.qkv_bias),
        ("self_attn.k_proj", kv, d, config.qkv_bias),
        ("self_attn.v_proj", kv, d, config.qkv_bias),
        ("self_attn.o_proj", d, q, config.attention_out_bias),
        ("mlp.gate_proj", f, d, config.mlp_bias),
        ("mlp.up_proj", f, d, config.mlp_bias),
        ("mlp.down_proj", d, f, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (d,)
        shapes[prefix + "post_attention_layernorm.weight"] = (d,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (head,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head,)
        for name, num_out, num_in, bias in linear:
            shapes[f"{prefix}{name}.weight"] = (num_out, num_in)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (num_out,)
    return shapes


def _layer(weights: _Checkpoint, config: ModelConfig, layer: int) -> LayerWeights:
    """Reads one layer and fuses queries, keys and values, and gate and up."""
    attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    qkv = (f"{attention}q_proj.", f"{attention}k_proj.", f"{attention}v_proj.")
    gate_up = (f"{mlp}gate_proj.", f"{mlp}up_proj.")

    def joined(names: tuple[str, ...], kind: str, present: bool = True) -> Tensor | None:
        return weights.joined(tuple(name + kind for name in names)) if present else None

    def one(name: str, present: bool = True) -> Tensor | None:
        return weights.tensor(name) if present else None

    return LayerWeights(
        input_norm=weights.tensor(f"model.layers.{layer}.input_layernorm.weight"),
        qkv=weights.joined(tuple(name + "weight" for name in qkv)),
        qkv_bias=joined(qkv, "bias", config.qkv_bias),
        q_norm=one(f"{attention}q_norm.weight", config.qk_norm),
        k_norm=one(f"{attention}k_norm.weight", config.qk_norm),
        out=weights.tensor(f"{attention}o_proj.weight"),
        out_bias=one(f"{attention}o_proj.bias", config.attention_out_bias),
        post_norm=weights.tensor(f"model.layers.{layer}.post_attention_layernorm.weight"),
        gate_up=weights.joined(tuple(name + "weight" for name in gate_up)),
        gate_up_bias=joined(gate_up, "bias", config.mlp_bias),
        down=weights.tensor(f"{mlp}down_proj.weight"),
        down_bias=one(f"{mlp}down_proj.bias", config.mlp_bias),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return value
