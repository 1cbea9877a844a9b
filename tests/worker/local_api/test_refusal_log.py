"""Refusals of local users in the worker's log: named and counted, and never a flood of lines."""

import time

import pytest
from leasehold_worker.local_api.refusal_log import PERIOD_S, USER_LIMIT, RefusalLog


def test_a_user_has_one_line_per_period_and_method(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, log = [1000.0], RefusalLog()
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    for _ in range(100):
        log.note(1000, "Claim", "first")
    log.note(1000, "Release", "another method")
    log.note(1001, "Claim", "another user")
    now_s[0] += PERIOD_S
    log.note(1000, "Claim", "later")
    assert caplog.messages == [
        "first",
        "another method",
        "another user",
        "later (99 such refusals before were left out)",
    ]


def test_many_users_share_lines_and_take_bounded_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, log = [1000.0], RefusalLog()
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    for uid in range(10 * USER_LIMIT):
        log.note(uid, "Claim", f"user {uid}")
    assert len(caplog.messages) == USER_LIMIT + 1
    assert len(log._periods) == USER_LIMIT + 1
    now_s[0] += PERIOD_S
    log.note(99_999, "Claim", "a newcomer")
    assert caplog.messages[-1] == "a newcomer", "idle users are forgotten"
