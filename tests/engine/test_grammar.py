"""Constrained decoding: what may follow, with a tokenizer of bytes and a few longer tokens."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from byte_tokenizer import EOS, EOS_ID, byte_tokenizer
from tiny_core import ids, request, run, tiny_parts

from relaykv.engine.assembly import build_core
from relaykv.engine.batch import SampledToken, SamplingRow
from relaykv.engine.config import CacheConfig
from relaykv.engine.grammar import GrammarError, GrammarMatchers, check_grammar, json_rule
from relaykv.engine.request import FinishReason, GrammarKind, GrammarSpec, SamplingParams
from relaykv.engine.sampler import Sampler

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"enum": [1, 12, True]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


TOKENIZER = byte_tokenizer()
WIDTH = TOKENIZER.vocab_size + 9  # of the logits, which may be padded


def matchers() -> GrammarMatchers:
    return GrammarMatchers(TOKENIZER, WIDTH, {EOS_ID})


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def allowed(mask: bytes) -> set[str]:
    ids = [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]
    assert all(token_id < TOKENIZER.vocab_size for token_id in ids)
    return {TOKENIZER.token_text(token_id) for token_id in ids}


def generate(
    spec: GrammarSpec | None,
    seed: int = 0,
    sampler: Sampler | None = None,
    limit: int = 120,
    **params: Any,
) -> list[int]:
    """Draws tokens from random logits until the end of the turn."""
    sampler = sampler or Sampler(matchers())
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(max_tokens=limit, grammar=spec, **params)
    output: list[int] = []
    while len(output) < limit:
        logits = torch.randn((1, WIDTH), generator=generator) * 3
        row = SamplingRow(sampling, seed, (1, 2), tuple(output), "r")
        (token,) = sampler.sample(logits, [row])
        assert token.error is None
        if token.token_id == EOS_ID:
            return output
        output.append(token.token_id)
    return output


def test_only_what_can_satisfy_the_schema_may_follow() -> None:
    spec, grammars = schema_spec(SCHEMA), matchers()
    # Not '{"', though it begins what must come: of bytes that are certain, only the tokens that
    # the encoder would choose are left.
    assert allowed(grammars.mask("r", spec, ())) == {"{"}
    output = TOKENIZER.encode('{"name": "abc", "n":')
    assert allowed(grammars.mask("r", spec, output)) == {" ", " 1"}
    output += TOKENIZER.encode(" ")
    assert allowed(grammars.mask("r", spec, output)) == {"1", "12", "t", "true"}
    output += TOKENIZER.encode("1")
    assert allowed(grammars.mask("r", spec, output)) == {"2", "}"}
    output += TOKENIZER.encode("}")
    assert allowed(grammars.mask("r", spec, output)) == {EOS}


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
def test_random_logits_give_valid_json(temperature: float) -> None:
    for seed in range(12):
        output = generate(schema_spec(SCHEMA), seed, temperature=temperature, top_k=40, top_p=0.9)
        value = json.loads(TOKENIZER.decode(output))
        assert value.keys() == {"name", "n"}
        assert len(value["name"]) <= 5
        assert value["n"] in (1, 12, True)


def test_penalties_and_bias_do_not_lift_a_grammar() -> None:
    bias = ((TOKENIZER.encode("x")[0], 100.0), (EOS_ID, 100.0))
    output = generate(schema_spec(SCHEMA), logit_bias=bias, repetition_penalty=1.5, min_p=0.05)
    assert json.loads(TOKENIZER.decode(output)).keys() == {"name", "n"}


def test_a_state_is_rebuilt_from_the_tokens_alone() -> None:
    spec = schema_spec(SCHEMA)
    output = generate(spec, seed=5, temperature=1.0)
    kept = matchers()
    masks = [kept.mask("r", spec, output[:stop]) for stop in range(len(output) + 1)]
    fresh = matchers()
    for stop in reversed(range(len(output) + 1)):  # every step looks like a preemption
        assert fresh.mask("r", spec, output[:stop]) == masks[stop]
    others = matchers()
    for stop, mask in enumerate(masks):
        others.mask("s", schema_spec({"type": "object"}), ())
        assert others.mask("r", spec, output[:stop]) == mask
        others.keep(["s"])


def test_rows_are_constrained_one_by_one() -> None:
    logits = torch.randn((4, WIDTH), generator=torch.Generator().manual_seed(1))
    spec = schema_spec(SCHEMA)
    rows = [
        SamplingRow(SamplingParams(max_tokens=9, temperature=t, grammar=g), 7, (1,), (), f"r{i}")
        for i, (t, g) in enumerate([(0.0, None), (0.0, spec), (1.0, None), (1.0, spec)])
    ]
    sampler = Sampler(matchers())
    together = sampler.sample(logits, rows)
    for index, row in enumerate(rows):
        alone = sampler.sample(logits[index : index + 1], [row])
        assert alone == [together[index]]
    assert together[0].token_id == int(logits[0].argmax())
    assert {TOKENIZER.token_text(together[i].token_id) for i in (1, 3)} <= {"{", '{"'}


def test_tokens_that_do_not_fit_end_one_row_with_an_error() -> None:
    logits = torch.zeros((2, WIDTH))
    logits[:, 5] = 1
    params = SamplingParams(max_tokens=9, temperature=0.0, grammar=schema_spec(SCHEMA))
    wrong = SamplingRow(params, 1, (1,), TOKENIZER.encode("[["), "a")
    right = SamplingRow(SamplingParams(max_tokens=9, temperature=0.0), 1, (1,), (), "b")
    failed, good = Sampler(matchers()).sample(logits, [wrong, right])
    assert failed.error is not None
    assert "do not fit" in failed.error
    assert good == SampledToken(5, None)
    (failed,) = Sampler().sample(logits[:1], [wrong])
    assert failed.error is not None


def test_a_grammar_that_does_not_compile_is_an_error_of_its_row() -> None:
    for spec in (
        schema_spec({"type": "nonsense"}),
        GrammarSpec(GrammarKind.LARK, "start: nothing"),
    ):
        with pytest.raises(GrammarError):
            matchers().mask("r", spec, ())
        with pytest.raises(GrammarError) as refused:
            check_grammar(spec)
        assert "\n" not in str(refused.value)
    with pytest.raises(GrammarError, match="end-of-turn"):
        GrammarMatchers(TOKENIZER, WIDTH, ()).mask("r", schema_spec(SCHEMA), ())


def test_lenient_rules_leave_out_what_is_not_supported() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        check_grammar(GrammarSpec(GrammarKind.LARK, f"start: {json_rule(schema)}"))
    check_grammar(GrammarSpec(GrammarKind.LARK, f"start: {json_rule(schema, lenient=True)}"))


def test_json_stands_on_one_line_with_single_spaces() -> None:
    spec, grammars = schema_spec({"type": "object"}), matchers()
    grammars.mask("r", spec, TOKENIZER.encode('{"a": [1, {"b": "Łódź\\n"}], "c": null}'))
    for text in ('{"a":1', '{ "a"', '{\n"a"', '{"a": 1,"b"'):
        with pytest.raises(GrammarError):
            grammars.mask("r", spec, TOKENIZER.encode(text))


TEXT_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 30, "maxLength": 50}},
    "required": ["text"],
    "additionalProperties": False,
}


def test_a_grammar_survives_preemption_and_company_and_ends_the_turn() -> None:
    # The vocabulary of the tiny model has 160 tokens, so only ASCII has a place.
    parts = dataclasses.replace(tiny_parts(), tokenizer=byte_tokenizer(ascii_only=True))
    spec = schema_spec(TEXT_SCHEMA)
    requests = [
        request(f"r{seed}", ids(seed, 40), 90, grammar=spec if seed != 2 else None,
                temperature=1.0, seed=seed)
        for seed in range(4)
    ]  # fmt: skip
    alone = [run(build_core(parts), wanted)[0] for wanted in requests]
    small = build_core(dataclasses.replace(parts, cache=CacheConfig(18)))
    together = run(small, *requests)
    assert small.stats().num_preemptions > 0
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one.token_ids == other.token_ids
        if index != 2:
            assert 30 <= len(json.loads(one.text)["text"]) <= 50
            assert one.last.finish_reason is FinishReason.STOP  # though it ignores that
    assert alone[2].last.finish_reason is FinishReason.LENGTH


def test_a_grammar_that_fails_ends_its_request_and_no_other() -> None:
    parts = dataclasses.replace(tiny_parts(), tokenizer=byte_tokenizer(ascii_only=True))
    bad = request("bad", ids(1, 9), 5, grammar=schema_spec({"type": "nonsense"}))
    good = request("good", ids(2, 9), 5)
    core = build_core(parts)
    failed, served = run(core, bad, good)
    assert failed.last.finish_reason is FinishReason.ERROR
    assert failed.last.error
    assert failed.token_ids == []
    assert served.last.finish_reason is FinishReason.LENGTH
    stats = core.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_running == 0
