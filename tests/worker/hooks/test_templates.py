"""Texts of hooks with names in braces."""

import pytest
from leasehold_worker.hooks.templates import NAMES, check, expand

VALUES = dict.fromkeys(NAMES, "x") | {"workload": "llm/1", "members": "41,42"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("", ""),
        ("park {workload} of {members}", "park llm/1 of 41,42"),
        ('{{"name": "{workload}"}}', '{"name": "llm/1"}'),
        ("{{workload}}", "{workload}"),
        ("{{{workload}}}", "{llm/1}"),
    ],
)
def test_names_are_replaced_and_doubled_braces_are_single(text: str, expanded: str) -> None:
    check(text)
    assert expand(text, VALUES) == expanded


@pytest.mark.parametrize("text", ["{nobody}", "{}", "{", "}", "{workload", "{ workload }", "{workload!r}"])
def test_what_is_no_template_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        check(text)


def test_values_are_not_templates() -> None:
    assert expand("{workload}", VALUES | {"workload": "{phase}"}) == "{phase}"


def test_values_are_quoted_as_asked() -> None:
    assert expand("/{workload}", VALUES, lambda value: value.replace("/", "%2F")) == "/llm%2F1"
