from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from dense_forward import dense_logits
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model, tiny_model
from torch import Tensor

from relaykv.engine.loader import ModelLoadError, load_model, resolve_model
from relaykv.engine.models.families import UnsupportedModelError

CPU = torch.device("cpu")
NORM = "model.norm.weight"


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replaces, adds or (None) removes tensors of a saved model."""
    tensors: dict[str, Tensor | None] = dict(load_file(folder / "model.safetensors"))
    tensors.update(changes)
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def test_a_sharded_model_loads_like_a_single_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    single = load_model(tmp_path / "single", torch.float32, CPU)
    sharded = load_model(tmp_path / "sharded", torch.float32, CPU)
    assert torch.equal(dense_logits(single, [1, 2, 3]), dense_logits(sharded, [1, 2, 3]))


def test_rotary_buffers_and_a_tied_head_are_ignored(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tied=True)
    rewrite(
        tmp_path,
        {
            "lm_head.weight": torch.zeros(160, 64),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        },
    )
    assert dense_logits(load_model(tmp_path, torch.float32, CPU), [5]).abs().max() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, "tensor model.norm.weight is missing"),
        ({NORM: torch.ones(32)}, r"model.norm.weight has shape \(32,\), .* asks for \(64,\)"),
        ({NORM: torch.ones(64, dtype=torch.int32)}, "model.norm.weight is I32"),
        ({"model.layers.9.mlp.up_proj.weight": torch.ones(1)}, "unexpected tensor model.layers.9"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path)
    rewrite(tmp_path, changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, torch.float32, CPU)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="save the model as safetensors"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load_model(tmp_path, torch.float32, CPU)


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"cannot read .*model\.safetensors"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json"):
        load_model(tmp_path, torch.float32, CPU)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_directory_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./missing", "/no/such/dir", "not-a-hub-id", "a/b/c"])
def test_a_name_that_is_neither_directory_nor_hub_id_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match="neither a directory nor a hub id"):
        resolve_model(name)


def test_an_unreachable_hub_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise OSError("cannot reach the hub\nwith a long explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model("owner/name")
    assert str(caught.value) == "cannot fetch 'owner/name' from the model hub: cannot reach the hub"
