"""The terminal: widths, and when there are colours."""

import pytest
from leasehold_client.display import terminal


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal with colours."""
    monkeypatch.setattr(terminal, "_is_terminal", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return monkeypatch


def test_no_color_and_dumb_terminals_have_no_colours(colours: pytest.MonkeyPatch) -> None:
    assert terminal.has_colour()
    colours.setenv("NO_COLOR", "")
    assert terminal.has_colour(), "an empty variable counts as unset (no-color.org)"
    colours.setenv("NO_COLOR", "0")
    assert not terminal.has_colour()
    colours.delenv("NO_COLOR")
    colours.setenv("TERM", "dumb")
    assert not terminal.has_colour()


def test_a_pipe_has_neither_colours_nor_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert not terminal.has_colour()
    assert terminal.columns() is None


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("RUNNING", 32),
        ("RUNNING(not ready)", 36),
        ("RUNNING(HOOK_FAILED)", 32),
        ("EXITED(0)", None),
        ("EXITED(1)", 31),
        ("FAILED", 31),
        ("CONNECTED,cordoned", 33),
        ("CONNECTED,insecure", 32),
        ("SUSPENDED(yielded)", 34),
        ("leased", None),
        ("", None),
        ("4711", None),
    ],
)
def test_a_state_keeps_its_text_in_its_colour(state: str, code: int | None) -> None:
    expected = state if code is None else f"\x1b[{code}m{state}\x1b[0m"
    assert terminal.coloured(state, state) == expected


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("東京都", 5, "東京…"), ("東京都", 4, "東…"), ("a bc", 3, "a…")],
)
def test_a_text_is_shortened_to_a_width(text: str, width: int, short: str) -> None:
    assert terminal.shortened(text, width) == short
    assert terminal.text_width(short) <= width
