from __future__ import annotations

from dataclasses import replace

from planted_model import planted_handoffs, prompt
from readable_model import readable_parts

from relaykv.engine.fidelity import Fidelity, FidelityLengths
from relaykv.engine.handoff import Handoff, Producer, parse_handoff
from relaykv.engine.handoff_slots import NUM_LEVELS
from relaykv.engine.producers import Lengths, Producers

TEXT = "What was written is this, word by word, although no model would have thought of it." * 2


def given(handoff: Handoff, output: str) -> Handoff:
    producers = tuple(Producer(p.system, p.user, output) for p in handoff.producers)
    return Handoff(handoff.id, handoff.domain, producers, handoff.consumer)


def test_a_producer_writes_what_is_given_and_leaves_kv_of_just_that() -> None:
    parts = readable_parts()
    handoffs = planted_handoffs(2)
    mixed = [given(handoffs[0], TEXT), handoffs[1]]
    producers = Producers(parts, prompt, mixed, Lengths(64, 8))
    (group,) = producers.groups
    texts = producers.write(group, lambda _: None)
    first, second = group
    assert [texts[name] for name in first.request_ids] == [TEXT] * len(first.producers)
    assert TEXT not in [texts[name] for name in second.request_ids]
    written = parts.tokenizer.encode(TEXT)
    for key, recordings, _ in producers.core.recordings.sessions(""):
        for recording in recordings:
            if key.session == first.handoff.id:
                output = recording.token_ids[recording.num_prompt_tokens :]
                assert list(output) == written[:-1]  # the last token has no KV


def test_what_is_given_may_be_longer_than_what_a_model_may_write() -> None:
    producers = Producers(
        readable_parts(), prompt, [given(planted_handoffs(1)[0], TEXT)], Lengths(8, 8)
    )
    (group,) = producers.groups
    texts = producers.write(group, lambda _: None)
    assert set(texts.values()) == {TEXT}


def test_a_file_may_give_outputs() -> None:
    line = {
        "id": "a",
        "producers": [{"system": "", "user": "Write.", "output": "Done."}],
        "consumer": {"system": "", "user_template": "{output_1}"},
    }
    assert parse_handoff(line).producers[0].output == "Done."


def test_lessons_are_seen_and_not_scored() -> None:
    parts = readable_parts()
    parts = replace(parts, relay=replace(parts.relay, num_offsets=30))
    lessons, tasks = planted_handoffs(4)[:3], planted_handoffs(4)[3:]
    lengths = FidelityLengths(producer=64, compared=8, greedy=12)
    fidelity = Fidelity(parts, prompt, tasks, ["shift", "auto"], lengths, lessons)
    done: list[float] = []
    results = list(fidelity.measure(done.append))
    assert [result.handoff for result in results] == [tasks[0].id]
    assert abs(sum(done) - 4) < 0.01
    handoffs = fidelity.core._scheduler._admission._chooser._handoffs
    assert handoffs is not None
    observed = [slot.num_observations for slot in handoffs._slots.values()]
    assert sum(observed) == NUM_LEVELS * sum(len(lesson.producers) for lesson in lessons)
