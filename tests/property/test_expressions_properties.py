"""What both engines take, RE2 and Python's own, they match alike."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.expressions import BadExpression, Expression

ATOMS = ["a", "b", "1", ":", " ", ".", r"\d", r"\w", r"\s", r"\S", "[ab]", "[^a]", r"\b", "^", "$", r"\."]
REPEATS = ["", "", "", "*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{2,}"]

expressions = st.recursive(
    st.builds("{}{}".format, st.sampled_from(ATOMS), st.sampled_from(["", "", "{2}", "{1,3}"])),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(REPEATS)),
    ),
    max_leaves=6,
)
texts = st.text("ab1: \n.\u00e9\U0001f680", max_size=14)


@given(expressions, st.booleans(), texts, texts)
def test_simple_expressions_match_as_they_do_in_python(
    expression: str, named: bool, label: str, text: str
) -> None:
    written = f"{re.escape(label)}(?P<value>{expression})" if named and "\n" not in label else expression
    try:
        compiled = Expression.compile(written)
    except BadExpression:
        return  # matches the empty text, mostly
    try:
        reference = re.compile(written, re.MULTILINE | re.ASCII)
    except re.error:
        return  # such as a repeated `^`
    group = "value" if "value" in reference.groupindex else 0
    matches = [*reference.finditer(f"{label}{text}")]
    expected = [match.span(group) for match in matches]
    if all(match[0] and match[group] for match in matches):  # else the engines go on from other places
        assert [*compiled.spans(f"{label}{text}")] == expected
