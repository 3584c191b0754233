"""The engine behind its thread: outputs arrive as they are made, and callers may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tiny_core import ids, request, run, tiny_core, tiny_parts

from relaykv.engine.async_engine import AsyncEngine
from relaykv.engine.client import EngineDeadError
from relaykv.engine.request import FinishReason, RequestOutput


async def _engine(**sizes: int) -> AsyncEngine:
    engine = AsyncEngine(tiny_core(**sizes), tiny_parts())
    engine.start()
    return engine


async def _collect(outputs: AsyncIterator[RequestOutput]) -> list[int]:
    return [token async for output in outputs for token in output.token_ids]


async def _idle(engine: AsyncEngine) -> None:
    while (await engine.stats()).num_running:
        await asyncio.sleep(0.005)


def test_concurrent_callers_each_get_their_own_answer() -> None:
    async def main() -> None:
        engine = await _engine()
        prompts = [ids(seed, 20 + seed) for seed in range(6)]
        requests = [request(str(i), prompt, 15) for i, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(_collect(engine.generate(r)) for r in requests))
        engine.stop()
        expected = [run(tiny_core(), request("x", p, 15))[0].token_ids for p in prompts]
        assert answers == expected

    asyncio.run(main())


def test_outputs_arrive_one_by_one_and_end_with_a_reason() -> None:
    async def main() -> None:
        engine = await _engine()
        outputs = [output async for output in engine.generate(request("a", ids(1, 10), 7))]
        engine.stop()
        assert [len(output.token_ids) for output in outputs] == [1] * 7
        assert [output.finish_reason for output in outputs] == [None] * 6 + [FinishReason.LENGTH]
        assert outputs[0].relay is not None
        assert outputs[1].relay is None
        assert outputs[-1].relay is not None

    asyncio.run(main())


def test_a_caller_that_leaves_aborts_its_request() -> None:
    async def main() -> None:
        engine = await _engine()
        outputs = engine.generate(request("a", ids(2, 10), 380))
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        await _idle(engine)
        stats = await engine.stats()
        engine.stop()
        assert stats.num_aborts == 1
        assert stats.num_used_blocks == 0

    asyncio.run(main())


def test_a_caller_that_leaves_before_the_first_output_aborts_too() -> None:
    async def main() -> None:
        engine = await _engine()
        task = asyncio.create_task(_collect(engine.generate(request("a", ids(3, 300), 90))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _idle(engine)
        stats = await engine.stats()
        engine.stop()
        assert (stats.num_used_blocks, stats.num_waiting) == (0, 0)

    asyncio.run(main())


def test_a_request_that_cannot_be_served_raises_in_its_caller_only() -> None:
    async def main() -> None:
        engine = await _engine()
        with pytest.raises(ValueError, match="the prompt has 500 tokens"):
            await _collect(engine.generate(request("a", ids(4, 500), 5)))
        with pytest.raises(ValueError, match="unknown policy 'magic'"):
            await _collect(engine.generate(request("b", ids(4, 50), 5, "s", policy="magic")))
        assert len(await _collect(engine.generate(request("c", ids(4, 50), 5)))) == 5
        engine.stop()

    asyncio.run(main())


def test_sessions_are_listed_for_their_tenant_and_deleted() -> None:
    async def main() -> None:
        engine = await _engine()
        await _collect(engine.generate(request("a", ids(5, 40), 9, "s", tenant="one")))
        (info,) = await engine.sessions("one")
        assert (info.session, len(info.recordings), info.num_blocks) == ("s", 1, 3)
        assert info.num_bytes > 0
        assert await engine.sessions("two") == ()
        assert not await engine.delete_session("two", "s")
        assert await engine.delete_session("one", "s")
        assert await engine.sessions("one") == ()
        assert (await engine.stats()).num_recorded_blocks == 0
        engine.stop()

    asyncio.run(main())


def test_stopping_ends_what_is_running_with_an_error() -> None:
    async def main() -> None:
        engine = await _engine()
        outputs = engine.generate(request("a", ids(6, 20), 300))
        await anext(outputs)
        engine.stop()
        with pytest.raises(EngineDeadError):
            await _collect(outputs)
        assert not engine.is_alive()
        assert not engine.is_ready()
        with pytest.raises(EngineDeadError):
            await _collect(engine.generate(request("b", ids(6, 20), 3)))

    asyncio.run(main())


def test_a_dying_engine_thread_is_told_to_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        core = tiny_core()
        engine = AsyncEngine(core, tiny_parts())
        engine.start()

        def explode() -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(core, "step", explode)
        with pytest.raises(EngineDeadError):
            await _collect(engine.generate(request("a", ids(7, 20), 3)))
        engine.stop()
        assert not engine.is_alive()

    asyncio.run(main())


def test_what_is_still_in_the_inbox_when_the_engine_ends_is_refused() -> None:
    async def main() -> None:
        engine = AsyncEngine(tiny_core(), tiny_parts())  # its thread has not started yet
        question = asyncio.create_task(engine.stats())
        answer = asyncio.create_task(_collect(engine.generate(request("a", ids(8, 9), 2))))
        await asyncio.sleep(0)
        engine._stopping = True
        engine.start()
        for task in (question, answer):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(task, 10)

    asyncio.run(main())


def test_a_question_that_fails_raises_in_its_caller_and_leaves_the_engine_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        core = tiny_core()
        engine = AsyncEngine(core, tiny_parts())
        engine.start()
        with monkeypatch.context() as patch:

            def explode() -> None:
                raise KeyError("counted wrong")

            patch.setattr(core, "stats", explode)
            with pytest.raises(KeyError):
                await engine.stats()
        assert (await engine.stats()).num_used_blocks == 0
        engine.stop()

    asyncio.run(main())
