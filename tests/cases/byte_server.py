"""The real engine behind the real server, around a tiny random model whose tokens are bytes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import httpx
import torch
from app_client import CHAT, AppClient
from fastapi import FastAPI
from tiny_models import tiny_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from relaykv.engine.assembly import EngineParts, build_core
from relaykv.engine.async_engine import AsyncEngine
from relaykv.engine.batch import ModelRunnerOutput, PendingStep, ScheduledBatch
from relaykv.engine.client import ModelCard
from relaykv.engine.config import CacheConfig, RelayConfig, SchedulerConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.loader import load_model
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.policy import Bands, builtin_policies
from relaykv.engine.tokenizer import Tokenizer
from relaykv.server.app import create_app
from relaykv.server.chat_template import HuggingFaceTemplate
from relaykv.server.prompt import PromptBuilder
from relaykv.server.settings import ServerSettings
from relaykv.server.state import Backend as ServerBackend
from relaykv.server.state import ServerState

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
NUM_TOKENS = 258  # every byte and the two control tokens
NUM_LOGITS = 272  # padded, as many models are
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ByteServer:
    """A server's state and application, and the core of its engine for a look between two steps."""

    state: ServerState
    app: FastAPI
    engine: AsyncEngine
    core: EngineCore

    @property
    def client(self) -> AppClient:
        return AppClient(self.app)

    def chat_all(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answers of plain chats that are served at the same time."""

        async def send_all() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))

        responses = asyncio.run(send_all())
        assert [response.status_code for response in responses] == [200] * len(bodies)
        return [response.json() for response in responses]

    def run_script(self, text: str) -> None:
        """From now on every request answers this text, whatever the model thinks."""
        script = [*byte_tokenizer().encode(text), NUM_TOKENS - 1]
        self.core.runner = cast(ModelRunner, ScriptedRunner(self.core.runner, script))

    def assert_idle(self) -> None:
        """Nothing runs, and nobody holds a block but recordings and the prefix cache."""
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        held = stats.num_free_blocks + stats.num_cached_blocks + stats.num_recorded_blocks
        assert held == stats.num_total_blocks
        assert all(block.num_requests == 0 for block in self.core.pool._blocks)


class ScriptedRunner:
    """Computes everything and then puts other tokens in the place of those it has chosen."""

    def __init__(self, runner: ModelRunner, script: Sequence[int]) -> None:
        self._runner = runner
        self._script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        rows = {r.request_id: r.sampling for r in batch.requests if r.sampling is not None}
        tokens = {name: self._script[len(row.output_token_ids)] for name, row in rows.items()}
        return _ScriptedStep(self._runner.launch(batch), tokens)


@dataclass(frozen=True, slots=True)
class _ScriptedStep:
    step: PendingStep
    token_ids: Mapping[str, int]  # by request

    def result(self) -> ModelRunnerOutput:
        output = self.step.result()
        sampled = {
            request_id: dataclasses.replace(token, token_id=self.token_ids[request_id])
            for request_id, token in output.sampled.items()
        }
        return dataclasses.replace(output, sampled=sampled)


@contextmanager
def byte_server(
    num_blocks: int = 160,
    max_num_batched_tokens: int = 64,
    max_num_requests: int = 8,
    max_model_len: int = 480,
    settings: ServerSettings | None = None,
) -> Iterator[ByteServer]:
    """A server in this process; its engine thread ends with the context."""
    limits = SchedulerConfig(max_num_batched_tokens, max_num_requests, max_model_len)
    parts = byte_parts(CacheConfig(num_blocks), limits)
    core = build_core(parts)
    engine = AsyncEngine(core, parts)
    engine.start()
    template = HuggingFaceTemplate(CHATML, SPECIAL_TOKENS)
    prompts = PromptBuilder(template, parts.tokenizer)
    state = ServerState(settings or ServerSettings(), ServerBackend(engine, prompts))
    try:
        yield ByteServer(state, create_app(state), engine, core)
    finally:
        engine.stop()
        state.close()


def byte_parts(cache: CacheConfig, scheduler: SchedulerConfig) -> EngineParts:
    model, tokenizer = byte_model(), byte_tokenizer()
    vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
    return EngineParts(
        folder=Path(),
        model=model,
        tokenizer=tokenizer,
        fingerprint="bytes",
        policies=builtin_policies(model.config.num_layers, Bands(1, 2, 2)),
        hidden_layer=1,
        cache=cache,
        scheduler=scheduler,
        relay=RelayConfig(),
        card=ModelCard("org/bytes", scheduler.max_model_len, vocab_size, 0),
    )


@cache
def byte_model() -> DecoderModel:
    with TemporaryDirectory() as folder:
        save_byte_model(Path(folder))
        return load_model(Path(folder), torch.float32, torch.device("cpu"))


def save_byte_model(folder: Path) -> None:
    """Saves the weights and their configuration as a Hugging Face folder."""
    model = tiny_model("llama", vocab_size=NUM_LOGITS)
    model.config.eos_token_id = NUM_TOKENS - 1
    model.save_pretrained(folder)


@cache
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend())


def byte_backend() -> Backend:
    """One token a byte, and the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return backend
