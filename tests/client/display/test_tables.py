"""Tables: which columns a view and a terminal show, and how wide they are."""

import pytest
from leasehold_client.display import terminal
from leasehold_client.display.tables import SHRUNK_WIDTH, Column, View, choose, echo_table, fit
from leasehold_client.errors import UsageError

Row = tuple[str, str, str, str]

COLUMNS: list[Column[Row]] = [
    Column("NAME", lambda row: row[0], shrinks=True),
    Column("STATE", lambda row: row[1], is_state=True),
    Column("IN USE", lambda row: row[2], drop=1),
    Column("REASON", lambda row: row[3], drop=2, shrinks=True),
    Column("ID", lambda row: "id", is_wide=True),
]
ROW: Row = ("alpha", "CONNECTED", "yes", "the fan is loud, and nobody has come to look at it yet")


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is a terminal of 50 columns without colours."""
    monkeypatch.setattr(terminal, "_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("NO_COLOR", "1")


def lines(capsys: pytest.CaptureFixture[str], view: View = View()) -> list[str]:  # noqa: B008
    echo_table(COLUMNS, [ROW], view)
    return capsys.readouterr().out.splitlines()


def test_a_file_gets_every_cell_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys) == [
        "NAME   STATE      IN USE  REASON",
        f"alpha  CONNECTED  yes     {ROW[3]}",
    ]


@pytest.mark.usefixtures("on_terminal")
def test_a_terminal_gets_lines_of_its_width(capsys: pytest.CaptureFixture[str]) -> None:
    headings, row = lines(capsys)
    assert headings == "NAME   STATE      IN USE  REASON"
    assert row == "alpha  CONNECTED  yes     the fan is loud, and no…"
    assert len(row) <= 50


@pytest.mark.usefixtures("on_terminal")
def test_wide_output_and_named_columns_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, View(is_wide=True))[1].endswith("yet  id")
    assert lines(capsys, View(names=("id", "in-use", "state"))) == [
        "ID  IN USE  STATE",
        "id  yes     CONNECTED",
    ]


def test_an_unknown_column_is_named_with_the_closest_one() -> None:
    with pytest.raises(
        UsageError, match="no column is named 'nmae' \\(did you mean 'name'\\?\\): choose name, "
    ):
        choose(COLUMNS, View(names=("nmae",)))


@pytest.mark.parametrize(
    ("limit", "fitted"),
    [
        (100, [30, 9, 6, 40]),
        (90, [30, 9, 6, 39]),
        (60, [23, 9, 6, SHRUNK_WIDTH]),
        (45, [26, 9, 6, 0]),
        (30, [19, 9, 0, 0]),
        (10, [30, 9, 0, 0]),
    ],
)
def test_cells_are_shortened_before_columns_are_dropped(limit: int, fitted: list[int]) -> None:
    found = fit(COLUMNS[:4], [30, 9, 6, 40], limit)
    shown = [width for width in found if width]
    assert found == fitted
    assert limit < 30 or sum(shown) + 2 * (len(shown) - 1) <= limit


def test_names_that_a_user_chose_are_not_dropped() -> None:
    assert all(fit(COLUMNS[:4], [30, 9, 6, 40], 10, may_drop=False))


@pytest.mark.usefixtures("on_terminal")
def test_wide_characters_take_two_columns_and_control_characters_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    echo_table(COLUMNS[:2], [("東京", "a\x1b[31m\nb", "", ""), ("e\u0301", "c", "", "")])
    assert capsys.readouterr().out.splitlines() == [
        "NAME  STATE",
        "東京  a\\x1b[31m\\nb",
        "e\u0301     c",
    ]
