"""Label selectors as filters."""

import pytest
from leasehold_client.arguments.selectors import both, label_filter
from leasehold_client.errors import UsageError
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.lists.filter_expression import And, Or, Restriction, parse_filter


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", ""),
        ("team=vision", 'labels."team" = "vision"'),
        ("team==vision", 'labels."team" = "vision"'),
        ("team = speech group", 'labels."team" = "speech group"'),
        ("team!=vision", 'NOT labels."team" = "vision"'),
        ("example.com/team=a", 'labels."example.com/team" = "a"'),
        ("team", 'labels:"team"'),
        ("!team", 'NOT labels:"team"'),
        ("team=", 'labels."team" = ""'),
        ("a in (x, y)", '(labels."a" = "x" OR labels."a" = "y")'),
        ("a notin (x)", 'NOT (labels."a" = "x")'),
        ('a="x"', 'labels."a" = "\\"x\\""'),
        ("a=1,!b, c!=2", 'labels."a" = "1" AND NOT labels:"b" AND NOT labels."c" = "2"'),
        ("inside=1", 'labels."inside" = "1"'),
    ],
)
def test_a_selector_becomes_a_filter(selector: str, expected: str) -> None:
    assert label_filter(selector) == expected


@pytest.mark.parametrize(
    "selector",
    ["=x", "a=b=c", "a b", "a in x", "a,,b", ",", "!", "a in (x", "(a)", "-a=1", "a in ()", "b, a notin ( )"],
)
def test_an_invalid_selector_is_refused(selector: str) -> None:
    with pytest.raises(UsageError, match="invalid selector"):
        label_filter(selector)


def test_two_filters_keep_their_meaning_together() -> None:
    text = both("a = 1 OR b = 2", "c = 3 OR d = 4")
    match parse_filter(text):
        case And((Or((a, b)), Or((c, d)))):
            assert [one.field for one in (a, b, c, d) if isinstance(one, Restriction)] == ["a", "b", "c", "d"]
        case found:
            pytest.fail(f"{text} means {found}")
    assert both("", "c = 3") == "c = 3"
    assert both("a = 1", " ") == "a = 1"


@pytest.mark.parametrize("text", ["nam! = 3", "  name = a b", "name = a)", "name = a and name = b"])
def test_the_refusal_of_the_first_filter_is_as_if_it_were_alone(text: str) -> None:
    with pytest.raises(FleetError) as alone:
        parse_filter(text)
    with pytest.raises(FleetError) as together:
        parse_filter(both(text, label_filter("team=vision")))
    assert together.value.message == alone.value.message


@pytest.mark.parametrize("text", ["name =", "name", "name = a OR"])
def test_an_unfinished_first_filter_is_refused_at_its_end(text: str) -> None:
    with pytest.raises(FleetError, match=rf"invalid filter at character {len(text) + 2}: 'AND'"):
        parse_filter(both(text, label_filter("team=vision")))
