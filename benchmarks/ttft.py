"""Time to first token of every agent of a chain, policy by policy, over HTTP.

One chain of agents runs in one session. Before agent i writes its own text (which the session
would then hold), its prompt is sent with every policy in turn, `--repeats` times, without being
stored. Role prompts are in the exact prefix cache for every policy; a nonce line behind them
keeps the rest of a measured prompt from hitting an earlier measurement. Agent i of a chain of
five does exactly what agent i of a shorter chain does, so one chain covers all lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import openai
from ttft_prompts import MAX_AGENTS, exact_role, task

from relaykv.clients.server_process import (
    SERVER_COMMAND,
    ServerError,
    is_loopback,
    running_server,
    sigterm_as_interrupt,
)
from relaykv.clients.streamed_answer import (
    IncompleteAnswerError,
    StreamedAnswer,
    open_client,
    stream_answer,
)

POLICIES = ("full", "shift", "epic", "cacheblend", "relay")
_ROW = "{:>5}  {:<10} {:>6} {:>6} {:>7} {:>10} {:>8} {:>6} {:>6}  {:>9} {:>13} {:>7}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request. Shares are parts of layer-tokens, 0 to 1."""

    agent: int  # 1 is the first
    policy: str
    repeat: int
    first_token_s: float
    prompt_tokens: int
    prefix: int
    relayed: int
    recomputed: int
    computed: int
    recomputed_share: float  # of the relayed segments
    layer_share: float  # of the whole prompt
    reason: str | None


def main(argv: Sequence[str] | None = None, command: Sequence[str] = SERVER_COMMAND) -> int:
    """Runs the benchmark; returns 0, or 1 after a message on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        with sigterm_as_interrupt():
            _run(options, shlex.join(["python", "benchmarks/ttft.py", *arguments]), command)
    except (ServerError, IncompleteAnswerError, ValueError) as error:
        print(f"ttft: {error}", file=sys.stderr)
        return 1
    except (openai.OpenAIError, httpx.HTTPError) as error:
        print(f"ttft: the server did not answer as hoped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ttft: interrupted", file=sys.stderr)
        return 1
    return 0


class Chain:
    """Measures one chain of agents on one server."""

    def __init__(
        self,
        client: openai.OpenAI,
        model: str,
        count: Callable[[str], int],
        options: argparse.Namespace,
    ) -> None:
        self._client = client
        self._model = model
        self._count = count
        self._options = options
        self._session = f"ttft-{secrets.token_hex(4)}"
        self._nonces = _nonces(count)
        self._outputs: list[str] = []

    def samples(self) -> Iterator[Sample]:
        """Yields the samples of one agent after the other, letting each write its text."""
        for index in range(self._options.agents):
            role = exact_role(index, self._options.role_tokens, self._count)
            self._warm(role)
            yield from self._measure(index, role)
            if index + 1 < self._options.agents:
                self._produce(index, role)

    def _measure(self, index: int, role: str) -> Iterator[Sample]:
        policies = self._options.policies
        for repeat in range(-self._options.warmups, self._options.repeats):
            # The order moves on by one each time, so that no policy always follows the same.
            start = repeat % len(policies)
            for policy in (*policies[start:], *policies[:start]):
                relay = {"policy": policy, "store": False}
                answer = self._ask(
                    role,
                    task(index, next(self._nonces), self._outputs),
                    max_tokens=1,
                    extra_body={"relay_session": self._session, "relay": relay},
                )
                if repeat >= 0:
                    yield _sample(index + 1, policy, repeat, answer)

    def _produce(self, index: int, role: str) -> None:
        """Lets an agent write; exactly, so that its text depends on no policy under test."""
        num_tokens = self._options.output_tokens
        answer = self._ask(
            role,
            task(index, next(self._nonces), self._outputs),
            max_tokens=num_tokens,
            extra_body={
                "relay_session": self._session,
                "relay": {"policy": "full", "store": True},
                "ignore_eos": True,
            },
        )
        self._outputs.append(answer.text)
        print(
            f"agent {index + 1} wrote {answer.num_output_tokens} tokens in {answer.total_s:.1f} s;"
            f" read again they are {self._count(answer.text)} tokens",
            flush=True,
        )
        if answer.num_output_tokens != num_tokens:
            raise ValueError(f"agent {index + 1} was to write exactly {num_tokens} tokens")

    def _warm(self, role: str) -> None:
        self._ask(role, "Are you ready?", max_tokens=1, extra_body={})

    def _ask(
        self, role: str, user: str, *, max_tokens: int, extra_body: dict[str, object]
    ) -> StreamedAnswer:
        return stream_answer(
            self._client,
            model=self._model,
            system=role,
            user=user,
            max_tokens=max_tokens,
            extra_body=extra_body,
        )


def format_table(samples: Sequence[Sample], policies: Sequence[str]) -> str:
    """Medians by agent and policy, with their ratio to `full`. Times in milliseconds."""
    head = _ROW.format(
        "agent", "policy", "prompt", "prefix", "relayed", "recomputed", "computed",
        "again%", "layer%", "median ms", "min-max ms", "to full",
    )  # fmt: skip
    rows = [head, "-" * len(head)]
    for agent in sorted({sample.agent for sample in samples}):
        full_ms = _median_ms([s for s in samples if s.agent == agent and s.policy == "full"])
        for policy in policies:
            mine = [s for s in samples if s.agent == agent and s.policy == policy]
            times_ms = sorted(sample.first_token_s * 1000 for sample in mine)
            last = mine[-1]
            rows.append(
                _ROW.format(
                    agent,
                    policy,
                    last.prompt_tokens,
                    last.prefix,
                    last.relayed,
                    last.recomputed,
                    last.computed,
                    f"{last.recomputed_share:.1%}"[:-1],
                    f"{last.layer_share:.1%}"[:-1],
                    f"{_median_ms(mine):.0f}",
                    f"{times_ms[0]:.0f}-{times_ms[-1]:.0f}",
                    f"{full_ms / _median_ms(mine):.2f} x",
                )
            )
            if last.reason is not None and policy != "full":
                rows.append(f"       {policy}: {last.reason}")
    return "\n".join(rows)


def machine_line() -> str:
    """Cores this process may use, CPU model, Python. The server's torch threads are its own."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {cpu}, Python {platform.python_version()}, torch threads unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/ttft.py",
        description="Time to first token of each agent of a chain, for every relay policy.",
        epilog="again%: layer-tokens of the relayed segments that were computed again;"
        " layer%: layer-tokens of the whole prompt that were computed;"
        " to full: median of `full` (exact prefix caching on) over this median.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", help="measure the server that runs there and start none")
    parser.add_argument("--model", default="default", help="model of the server to start")
    parser.add_argument("--agents", type=int, choices=range(2, MAX_AGENTS + 1), default=MAX_AGENTS)
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds")
    parser.add_argument("--warmups", type=int, default=1, help="rounds before them, thrown away")
    parser.add_argument("--role-tokens", type=int, default=512, help="of every role prompt")
    parser.add_argument("--output-tokens", type=int, default=512, help="of every agent's text")
    parser.add_argument(
        "--policies", nargs="+", default=list(POLICIES), help="`full` must be among them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument(
        "--ready-timeout", type=float, default=900.0, help="seconds the server may take to load"
    )
    return parser


def _run(options: argparse.Namespace, command_line: str, command: Sequence[str]) -> None:
    if "full" not in options.policies or options.repeats < 1 or options.warmups < 0:
        raise ValueError("`full` must be among --policies, and --repeats at least 1")
    server = running_server(
        options.url, command=command, model=options.model, timeout_s=options.ready_timeout
    )
    with server as root, open_client(root) as client, _http(root) as http:
        models = client.models.list().data
        if not models:
            raise ServerError(f"the server at {root} lists no model")
        model = models[0].id
        print(f"machine: {machine_line()}\ncommand: {command_line}\nmodel:   {model}", flush=True)
        chain = Chain(client, model, lambda text: _count_tokens(http, root, text), options)
        samples = list(chain.samples())
    print()
    print(format_table(samples, options.policies))
    if options.json is not None:
        raw = {
            "machine": machine_line(),
            "command": command_line,
            "model": model,
            "samples": [asdict(sample) for sample in samples],
        }
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


def _http(root: str) -> httpx.Client:
    return httpx.Client(trust_env=not is_loopback(root), timeout=60.0)


def _count_tokens(http: httpx.Client, root: str, text: str) -> int:
    response = http.post(f"{root}/tokenize", json={"text": text})
    response.raise_for_status()
    return int(response.json()["count"])


def _nonces(count: Callable[[str], int]) -> Iterator[str]:
    """Lines that differ from their first token or two on and have the same number of tokens."""
    first = 1_000_000 + secrets.randbelow(8_000_000)
    wanted: int | None = None
    for number in range(first, 10_000_000):
        line = f"{str(number)[::-1]} is the number of this job."  # the fast digit first
        num_tokens = count(line)
        wanted = num_tokens if wanted is None else wanted
        if num_tokens == wanted:
            yield line


def _sample(agent: int, policy: str, repeat: int, answer: StreamedAnswer) -> Sample:
    prompt = answer.prompt
    return Sample(
        agent=agent,
        policy=policy,
        repeat=repeat,
        first_token_s=answer.first_token_s,
        prompt_tokens=prompt.total,
        prefix=prompt.prefix,
        relayed=prompt.relayed,
        recomputed=prompt.recomputed,
        computed=prompt.computed,
        recomputed_share=prompt.recomputed_share,
        layer_share=prompt.layer_share,
        reason=answer.reason,
    )


def _median_ms(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.first_token_s for sample in samples) * 1000


if __name__ == "__main__":
    sys.exit(main())
