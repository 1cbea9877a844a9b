"""Suggestions for mistyped words."""

from leasehold_client.arguments.suggestions import close_to, closest


def test_only_a_close_word_is_suggested() -> None:
    assert closest("worlkoads", ["workers", "workloads"]) == "workloads"
    assert closest("WORKERS", ["workers"]) == "workers"
    assert closest("zzz", ["workers"]) is None
    assert close_to("stpo", ["stop"]) == " (did you mean 'stop'?)"
    assert closest("gte", ["teg", "get", "gate"]) == "get"
    assert close_to("zzz", ["stop"]) == ""
    assert closest("sup", ["suspend"]) is None, "three of seven letters are no mistype"
