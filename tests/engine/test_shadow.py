from __future__ import annotations

from itertools import pairwise

import pytest

from relaykv.engine.shadow import ShadowBook, ShadowJob, ShadowSampler


def _job(name: str) -> ShadowJob:
    return ShadowJob(name, "auto", "", "s", "", (1, 2), (3,))


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.25, 1 / 3, 0.7, 1.0])
def test_the_share_that_is_chosen_is_the_rate_and_chosen_ones_are_spread(rate: float) -> None:
    sampler = ShadowSampler(rate)
    taken = [index for index in range(3000) if sampler.take()]
    assert len(taken) == round(3000 * rate)
    gaps = {b - a for a, b in pairwise(taken)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="share from 0 to 1"):
        ShadowSampler(rate)


def test_of_too_many_jobs_the_oldest_gives_way_and_an_interrupted_one_is_next() -> None:
    book = ShadowBook("auto", 0.05)
    dropped = [book.add(_job(str(number))) for number in range(10)]
    assert [job.request_id for job in dropped if job is not None] == ["0", "1"]
    assert book.num_dropped == 2
    assert book.num_waiting == 8
    first = book.next()
    assert first is not None
    assert first.request_id == "2"
    book.put_back(first)
    assert book.next() == first


def test_a_policy_is_given_up_after_twenty_runs_above_the_bound_and_not_before() -> None:
    book = ShadowBook("shift", 0.05)
    said = [book.note("shift", 0.06, 0.9) for _ in range(20)]
    assert said[:19] == [None] * 19
    assert said[19] is not None
    assert "'shift' were 0.060 nats" in said[19]
    assert "'epic' from now on" in said[19]
    assert book.default_policy == "epic"
    assert book.note("shift", 0.06, 0.9) is None  # it is given up already


def test_only_the_last_twenty_count_and_only_those_of_the_default() -> None:
    book = ShadowBook("auto", 0.05)
    for _ in range(30):
        assert book.note("shift", 9.0, 0.1) is None
    for _ in range(100):
        assert book.note("auto", 0.01, 1.0) is None
    said = [book.note("auto", 0.2, 0.5) for _ in range(20)]
    # 0.01 of the last 20 are replaced one by one: five of them at 0.2 are a mean above 0.05.
    assert [message is not None for message in said].index(True) == 4
    assert book.default_policy == "auto@0.25"


def test_every_policy_ends_at_full() -> None:
    for policy in ("shift", "kvcomm", "epic", "relay", "cacheblend@0.2", "learned", "auto@0.5"):
        book = ShadowBook(policy, 0.05)
        seen = [policy]
        while book.default_policy != "full":
            for _ in range(20):
                book.note(book.default_policy, 1.0, 0.0)
            assert book.default_policy not in seen
            seen.append(book.default_policy)
        assert len(seen) <= 5


def test_summaries_tell_means_and_the_worst_run() -> None:
    book = ShadowBook("auto", 0.05)
    book.note("auto", 0.01, 1.0)
    book.note("auto", 0.03, 0.5)
    (summary,) = book.summaries()
    assert summary.policy == "auto"
    assert summary.num_runs == 2
    assert summary.mean_kl == pytest.approx(0.02)
    assert summary.max_kl == 0.03
    assert summary.agreement == 0.75


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_no_divergence_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="divergence above 0"):
        ShadowBook("auto", bound)


def test_names_that_clients_make_up_do_not_fill_the_book() -> None:
    book = ShadowBook("auto", 0.05)
    for number in range(1, 200):
        book.note("auto", 0.01, 1.0)
        book.note(f"auto@0.{number:03}", 0.01, 1.0)
    summaries = book.summaries()
    assert len(summaries) == 32
    assert next(s for s in summaries if s.policy == "auto").num_runs == 199
