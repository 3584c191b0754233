"""What the commands that run a model by themselves have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from tqdm import tqdm

from relaykv.engine.options import EngineOptions
from relaykv.server.chat_template import ChatTemplate

_BAR = "{l_bar}{bar}| {n:.1f} of {total} {unit} [{elapsed}, {remaining} left]"

T = TypeVar("T")


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """Adds those that choose the model, the hand-offs and the device."""
    defaults = EngineOptions()
    command.add_argument(
        "--model",
        metavar="NAME_OR_DIR",
        default=defaults.model,
        help="'default', a Hugging Face folder or a hub id (default: %(default)s)",
    )
    command.add_argument(
        "--handoffs",
        type=Path,
        metavar="FILE",
        help="hand-offs of your own, as JSON Lines, instead of the shipped ones",
    )
    command.add_argument(
        "--limit", type=at_least(1), metavar="COUNT", help="use only the first hand-offs"
    )
    command.add_argument(
        "--device",
        default=defaults.device,
        help="cpu, cuda or cuda:1; auto: a GPU when there is one (default: %(default)s)",
    )
    command.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default=defaults.dtype,
        help="type of weights and KV cache (default: %(default)s)",
    )
    command.add_argument(
        "--threads",
        type=at_least(1),
        metavar="COUNT",
        help="CPU threads of torch (default: torch decides)",
    )


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """Of an engine that computes the same every time, step by step."""
    return EngineOptions(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        num_threads=options.threads,
        deterministic=True,
        overlap=False,
        cuda_graphs=False,
    )


def prompt_of(template: ChatTemplate, tokenizer: Encoder) -> Callable[[str, str], list[int]]:
    """Renders and tokenises a system text, unless it is empty, and a user text."""

    def prompt(system: str, user: str) -> list[int]:
        messages = [{"role": "user", "content": user}]
        if not system:
            return tokenizer.encode(template.render(messages))
        try:
            text = template.render([{"role": "system", "content": system}, *messages])
        except Exception:  # some templates refuse system messages, each in its own way
            text = template.render([{"role": "user", "content": f"{system}\n\n{user}"}])
        return tokenizer.encode(text)

    return prompt


def with_progress(
    measure: Callable[[Callable[[float], None]], Iterator[T]],
    title: str,
    total: int,
    unit: str = "hand-offs",
) -> list[T]:
    """Runs to the end, with a bar that counts what `measure` tells of."""
    # Closed also when the user interrupts: the bar must not swallow what is printed next.
    # The time left is judged by the whole run so far: decoding and reading take turns.
    style = {"bar_format": _BAR, "smoothing": 0, "mininterval": 0.5}
    with tqdm(total=total, desc=title, unit=unit, **style) as bar:
        # Parts of hand-offs add up to a little more than all of them.
        return list(measure(lambda step: bar.update(min(step, total - bar.n))))


def at_least(least: int) -> Callable[[str], int]:
    """Parses whole numbers from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least {least}")
        return int(text)

    return number


def say(text: str) -> None:
    """Tells the user something that is not a result."""
    print(f"relaykv: {text}", file=sys.stderr)
