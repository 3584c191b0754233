"""The `relaykv` command."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from relaykv.engine.options import EngineOptions
from relaykv.server.fidelity_command import add_fidelity, run_fidelity
from relaykv.server.launcher import ListenOptions, LoadedModel, run_server
from relaykv.server.profile_command import add_profile, run_profile
from relaykv.server.settings import ServerSettings

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0, 1 on a failure, 2 on wrong usage."""
    options = build_parser().parse_args(arguments)
    try:
        if options.command == "serve":
            return _serve(options)
        if options.command == "profile":
            _limit_spinning()
            return run_profile(options)
        if options.command == "fidelity":
            _limit_spinning()
            return run_fidelity(options)
        return _pull_model()
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="relaykv",
        description="An OpenAI-compatible server that relays KV cache between agents.",
    )
    parser.add_argument("--version", action="version", version=f"relaykv {package_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    add_profile(commands)
    add_fidelity(commands)
    model = commands.add_parser("model", help="manage models on this machine")
    actions = model.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("pull", help="download and convert the default model")
    return parser


def package_version() -> str:
    """Version of the installed package."""
    try:
        return version("relaykv")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"


def parse_size(text: str) -> int:
    """Bytes of a size such as `2GiB`, `2G` (both powers of 1024), `2GB` (powers of 1000) or `4096`.

    Raises:
        argparse.ArgumentTypeError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write for example 2GiB or 512MiB")
    number, unit, binary = match.groups()
    is_decimal = text.strip().upper().endswith("B") and not binary
    size = int(float(number) * (1000 if is_decimal else 1024) ** _POWERS[unit.upper()])
    if size < 1:
        raise argparse.ArgumentTypeError("the size must be at least one byte")
    return size


def parse_size_or_zero(text: str) -> int:
    """Bytes of a size as `parse_size` takes them, or of `0`."""
    return 0 if text.strip() == "0" else parse_size(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least 1")
    return int(text)


def _share_or_zero(text: str) -> float:
    return 0.0 if text.strip() == "0" else _share(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no share above 0 and up to 1")
    return share


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 0 < bound < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no divergence above 0")
    return bound


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port number from 0 to 65535")
    return int(text)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    defaults = EngineOptions()
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    http = serve.add_argument_group("HTTP")
    http.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    http.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="0 takes a free one and prints it (default: %(default)s)",
    )
    levels = ["critical", "error", "warning", "info", "debug"]
    http.add_argument(
        "--log-level", choices=levels, default="info", help="how much to log (default: %(default)s)"
    )
    model = serve.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="NAME_OR_DIR",
        default=defaults.model,
        help="'default', a Hugging Face folder or a hub id (default: %(default)s)",
    )
    model.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name that clients use (default: the model's own)",
    )
    model.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default=defaults.dtype,
        help="type of weights and KV cache; auto: float32 on a CPU, bfloat16 on a GPU "
        "(default: %(default)s)",
    )
    model.add_argument(
        "--max-model-len",
        type=_positive,
        metavar="TOKENS",
        help="prompt and answer together; at most, and by default, what the model allows",
    )
    _add_engine(serve, defaults)
    _add_gpu(serve, defaults)


def _add_engine(serve: argparse.ArgumentParser, defaults: EngineOptions) -> None:
    engine = serve.add_argument_group("engine")
    engine.add_argument(
        "--kv-memory",
        type=parse_size,
        metavar="SIZE",
        help="memory for KV cache, e.g. 2GiB (default: by the machine)",
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=_positive,
        metavar="TOKENS",
        help="rows that one step computes (default: 512 on a CPU, 8192 on a GPU)",
    )
    engine.add_argument(
        "--max-num-requests",
        type=_positive,
        metavar="COUNT",
        default=defaults.max_num_requests,
        help="requests that run at the same time; others wait (default: %(default)s)",
    )
    engine.add_argument(
        "--relay-policy",
        metavar="POLICY",
        default=defaults.relay_policy,
        help="for requests that name a session and no policy (default: %(default)s)",
    )
    engine.add_argument(
        "--shadow-rate",
        type=_share_or_zero,
        metavar="SHARE",
        default=defaults.shadow_rate,
        help="share of relayed requests that are computed in full too, when the server is idle, to "
        "see how far answers drift; 0: none (default: %(default)s)",
    )
    engine.add_argument(
        "--shadow-bound",
        type=_bound,
        metavar="NATS",
        default=defaults.shadow_bound,
        help="mean drift of 20 of them at which sessions get a safer policy (default: %(default)s)",
    )
    engine.add_argument(
        "--learned-memory",
        type=parse_size_or_zero,
        metavar="SIZE",
        default=defaults.learned_memory_bytes,
        help="memory for what recurring hand-offs have in common, which the policies auto and "
        "learned add to relayed KV; 0: learn nothing (default: 64MiB)",
    )
    engine.add_argument(
        "--anchor-share",
        type=_share_or_zero,
        metavar="SHARE",
        default=defaults.anchor_share,
        help="share of the KV cache in which the policy kvcomm may keep anchors, 0 to 1 "
        "(default: %(default)s)",
    )
    engine.add_argument(
        "--profile",
        metavar="FILE",
        help="the model's relay bands (default: what `relaykv profile` has found, else the shipped "
        "ones, else safe ones)",
    )
    engine.add_argument(
        "--threads",
        type=_positive,
        metavar="COUNT",
        help="CPU threads of torch (default: torch decides)",
    )


def _add_gpu(serve: argparse.ArgumentParser, defaults: EngineOptions) -> None:
    gpu = serve.add_argument_group("GPU", "docs/gpu.md says more")
    gpu.add_argument(
        "--device",
        default=defaults.device,
        help="cpu, cuda or cuda:1; auto: a GPU when there is one (default: %(default)s)",
    )
    gpu.add_argument(
        "--gpu-memory-share",
        type=_share,
        metavar="SHARE",
        default=defaults.gpu_memory_share,
        help="of the device's memory that may be taken in all (default: %(default)s)",
    )
    gpu.add_argument(
        "--no-cuda-graphs", action="store_true", help="launch every kernel of a decode step"
    )
    gpu.add_argument(
        "--no-overlap", action="store_true", help="schedule a step only when the last one has ended"
    )
    gpu.add_argument(
        "--deterministic",
        action="store_true",
        help="attention that does not depend on what else is in the batch; slower",
    )
    gpu.add_argument(
        "--stock-attention",
        action="store_true",
        help="use only FlashInfer's own modules for relayed prompts; slower, builds one less",
    )


def _serve(options: argparse.Namespace) -> int:
    logging.basicConfig(
        level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    engine_options = EngineOptions(
        model=options.model,
        served_model_name=options.served_model_name,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        kv_memory_bytes=options.kv_memory,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_requests=options.max_num_requests,
        relay_policy=options.relay_policy,
        shadow_rate=options.shadow_rate,
        shadow_bound=options.shadow_bound,
        learned_memory_bytes=options.learned_memory,
        anchor_share=options.anchor_share,
        profile=options.profile,
        num_threads=options.threads,
        device=options.device,
        gpu_memory_share=options.gpu_memory_share,
        cuda_graphs=not options.no_cuda_graphs,
        overlap=not options.no_overlap,
        deterministic=options.deterministic,
        stock_attention=options.stock_attention,
    )
    settings = ServerSettings(version=package_version(), default_policy=options.relay_policy)
    listen = ListenOptions(options.host, options.port, options.log_level)
    return run_server(lambda: _load(engine_options, settings), settings, listen)


def _limit_spinning() -> None:
    """Lets idle OpenMP threads sleep soon instead of spinning, unless the user says otherwise.

    By default they spin so long that on a busy machine threads which wait take the processor
    from those that work: measured beside other busy processes, decode steps 2.4 times and a
    prefill 6.6 times slower, for nothing gained on an idle machine (benchmarks/RESULTS.md).
    Must run before torch is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _load(options: EngineOptions, settings: ServerSettings) -> LoadedModel:
    _limit_spinning()
    # Imported here: the server itself and --help never need torch.
    from relaykv.engine.async_engine import load_engine
    from relaykv.server.chat_template import HuggingFaceTemplate
    from relaykv.server.prompt import PromptBuilder
    from relaykv.server.state import Backend

    engine = load_engine(options)
    template = HuggingFaceTemplate.from_folder(engine.folder)
    prompts = PromptBuilder(template, engine.tokenizer, settings.num_prompt_threads)
    return LoadedModel(Backend(engine, prompts), engine.stop)


def _pull_model() -> int:
    from relaykv.engine.model_store import pull_default_model

    try:
        folder = pull_default_model(progress=True)
    except Exception as error:
        print(f"relaykv: error: {error}", file=sys.stderr)
        return 1
    print(f"The default model is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
