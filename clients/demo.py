"""Three agents in a chain, with and without a relay session: what `make demo` runs."""

from __future__ import annotations

import argparse
import secrets
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import openai

from relaykv.clients.demo_agents import AGENTS
from relaykv.clients.server_process import (
    SERVER_COMMAND,
    ServerError,
    running_server,
    sigterm_as_interrupt,
)
from relaykv.clients.streamed_answer import (
    IncompleteAnswerError,
    StreamedAnswer,
    open_client,
    stream_answer,
)

_WIDTH = 110
_JOB_STEP = 111_111  # changes the first digit, hence the first token
_ROW = "{:<9} {:<15} {:>7} {:>7} {:>8} {:>11} {:>9}   {:>13} {:>9}"


@dataclass(frozen=True, slots=True)
class Chain:
    """How the chain is run."""

    model: str
    max_tokens: int
    job: int  # six digits at the head of every task, so that two runs share no task's prefix
    session: str | None
    policy: str | None


def main(argv: Sequence[str] | None = None, command: Sequence[str] = SERVER_COMMAND) -> int:
    """Runs the demo; returns 0, or 1 after a message on stderr. `command` runs the server."""
    options = _parser().parse_args(argv)
    try:
        with sigterm_as_interrupt():
            _run(options, command)
    except (ServerError, IncompleteAnswerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except openai.OpenAIError as error:
        print(f"demo: the server did not answer as hoped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 1
    return 0


def format_table(plain: Sequence[StreamedAnswer], relayed: Sequence[StreamedAnswer]) -> str:
    """Two rows an agent: the run without a session, the run with one. Times in seconds."""
    rows = [
        _ROW.format(
            "agent", "run", "prompt", "prefix", "relayed", "recomputed", "computed",
            "first token", "speed-up",
        )
    ]  # fmt: skip
    rows.append("-" * len(rows[0]))
    for agent, before, after in zip(AGENTS, plain, relayed, strict=True):
        rows.append(_row(agent.name, "without session", before, ""))
        speedup = f"{before.first_token_s / after.first_token_s:.2f} x"
        rows.append(_row("", "with session", after, speedup))
    return "\n".join(row.rstrip() for row in rows)


def format_meaning(plain: Sequence[StreamedAnswer], relayed: Sequence[StreamedAnswer]) -> str:
    """One sentence in plain words about the last agent."""
    before, after = plain[-1], relayed[-1]
    reused = after.prompt.relayed + after.prompt.recomputed
    name = AGENTS[-1].name
    if reused == 0:
        why = f" ({after.reason})" if after.reason else ""
        return f"Nothing was relayed to the {name}{why}, so the session saved it no time."
    speedup = before.first_token_s / after.first_token_s
    when = f"{speedup:.1f} times as fast" if speedup >= 1.05 else "no faster"
    return (
        f"With a session the {name} began to answer {when}: of its {after.prompt.total} prompt"
        f" tokens the server took {reused} over from what earlier agents had read or written and"
        f" repaired {after.prompt.recomputed} of them, instead of computing them all again. (Every"
        f" time is a single measurement; benchmarks/ttft.py takes medians.)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m relaykv.clients.demo",
        description="Run a chain of three agents twice, without and with a relay session.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", help="use the server that runs there and start none")
    parser.add_argument("--model", default="default", help="model of the server to start")
    parser.add_argument("--max-tokens", type=int, default=240, help="of each agent's answer")
    parser.add_argument("--policy", help="relay policy; without it the server chooses")
    parser.add_argument(
        "--ready-timeout", type=float, default=900.0, help="seconds the server may take to load"
    )
    return parser


def _run(options: argparse.Namespace, command: Sequence[str]) -> None:
    if options.url is None:
        _say("Starting a server; the first start downloads and converts the default model.")
    with (
        running_server(
            options.url,
            command=command,
            model=options.model,
            timeout_s=options.ready_timeout,
            report=_say,
        ) as root,
        open_client(root) as client,
    ):
        models = client.models.list().data
        if not models:
            raise ServerError(f"the server at {root} lists no model")
        _say(f"The server at {root} is ready and serves {models[0].id}.")
        # A server of our own is new: fixed numbers there make the texts repeatable.
        job = 100_000 + (0 if options.url is None else secrets.randbelow(600_000))
        _run_twice(client, models[0].id, job, options)


def _run_twice(client: openai.OpenAI, model: str, job: int, options: argparse.Namespace) -> None:
    _say(
        "Warming up every agent's role prompt: both runs then find it in the exact prefix cache,\n"
        "so that their difference shows relaying alone."
    )
    for agent in AGENTS:
        stream_answer(client, model=model, system=agent.role, user="Are you ready?", max_tokens=2)
    _say("Run 1, without a session (exact prefix caching only):")
    first = Chain(model, options.max_tokens, job, None, None)
    plain = run_chain(client, first)
    session = f"demo-{secrets.token_hex(4)}"
    _say(f"Run 2, with relay_session={session!r}:")
    second = Chain(model, options.max_tokens, job + _JOB_STEP, session, options.policy)
    relayed = run_chain(client, second)
    _say("\nPrompt tokens by kind, and seconds to the first token:\n")
    _say(format_table(plain, relayed))
    _say("\nHow the texts begin:")
    for agent, before, after in zip(AGENTS, plain, relayed, strict=True):
        _say(_opening(f"{agent.name}, without session", before.text))
        _say(_opening(f"{agent.name}, with session", after.text))
    _say("")
    _say(textwrap.fill(format_meaning(plain, relayed), _WIDTH))


def run_chain(client: openai.OpenAI, chain: Chain) -> list[StreamedAnswer]:
    """Lets every agent answer in turn; each reads what its own run's agents wrote."""
    extra: dict[str, object] = {}
    if chain.session is not None:
        extra["relay_session"] = chain.session
        if chain.policy is not None:
            extra["relay"] = {"policy": chain.policy}
    answers: list[StreamedAnswer] = []
    for agent in AGENTS:
        task = agent.task_with([answer.text for answer in answers])
        answer = stream_answer(
            client,
            model=chain.model,
            system=agent.role,
            user=f"{chain.job} is the number of this job.\n\n{task}",
            max_tokens=chain.max_tokens,
            extra_body=extra,
        )
        answers.append(answer)
        _say(
            f"  {agent.name:<9} read {answer.prompt.total} tokens in {answer.first_token_s:.2f} s,"
            f" wrote {answer.num_output_tokens} in {answer.total_s - answer.first_token_s:.1f} s"
        )
    return answers


def _row(agent: str, run: str, answer: StreamedAnswer, speedup: str) -> str:
    prompt = answer.prompt
    return _ROW.format(
        agent,
        run,
        prompt.total,
        prompt.prefix,
        prompt.relayed,
        prompt.recomputed,
        prompt.computed,
        f"{answer.first_token_s:.3f} s",
        speedup,
    )


def _opening(label: str, text: str) -> str:
    """The first two lines' worth of a text under a label."""
    body = textwrap.wrap(" ".join(text.split()), _WIDTH - 4)
    return "\n".join([f"  {label}:", *(f"    {line}" for line in body[:2])])


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
