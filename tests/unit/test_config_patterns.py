"""Expressions over modules' names: what matches is what `re` matches, and nothing takes for ever."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.patterns import NamePattern, PatternFlaw, name_pattern
from engine.errors import UserError

NAME = "model.layers.10.self_attn.q_proj" + "a" * 30

_ATOMS = st.sampled_from(["a", "b", "ab", ".", "[ab]", "[^a]", r"\.", "A", "(?i:a)", "^", "$", r"\b", r"\w", "(?:)"])
_REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "*?", "+?", "??", "{2,}", "{3}?"])
EXPRESSIONS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, _REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(st.sampled_from("=!"), inner).map(lambda pair: f"(?{pair[0]}{pair[1]})"),
    ),
    max_leaves=8,
)


@settings(max_examples=1500)
@given(text=EXPRESSIONS, names=st.lists(st.text("abA.", max_size=6), min_size=4, max_size=4))
def test_what_matches_is_what_re_matches(text: str, names: list[str]) -> None:
    expected = re.compile(text)
    for name in names:
        assert NamePattern(text).matches(name) == (expected.fullmatch(name) is not None)


@pytest.mark.parametrize(
    "text",
    [
        r"(([a-z_.0-9])+)+!", r"(.*.*)*!", r"(a|a)*b", r"(.*\.)?((.*.*)*!)", ".*" * 12 + "!", "(a*)*" * 100 + "!",
        "(((a{1000}){1000}){1000})", "((.*){1,4000000000}){4000000000}!", "(?:" * 60 + "a*" + ")*" * 60 + "!",
        r"(?<=a)(?:a|aa)*!", r"(?:(?=(?:.*)*!)a)*!",
    ],
)  # fmt: skip
def test_what_would_take_for_ever_does_not(text: str) -> None:
    begin = time.process_time()
    assert not NamePattern(text).matches(NAME)
    assert time.process_time() - begin < 2


def test_there_is_an_end_to_patience() -> None:
    pattern = NamePattern("(?:(?:.*a)*(?:.*b)*)*" * 40 + "!")
    with pytest.raises(UserError, match="has too many ways to match a module's name"):
        for number in range(10_000):
            pattern.matches(f"{NAME}{number}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a{99999999999}", "repetition number is too large"),
        ("(" * 3000 + ")" * 3000, "nests too deeply"),
        ("(q", "unterminated"),
        ("a(?i)q", "global flags not at the start"),
        ("a" * 10_001, "10,001 characters"),
        (r"((.*)\2)*", "a backreference"),
    ],
)
def test_what_is_no_expression(text: str, words: str) -> None:
    with pytest.raises(PatternFlaw, match=words):
        name_pattern(text)


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        (r".*self_attn\.(q|v)_proj", "model.layers.3.self_attn.v_proj", True),
        (r"^(?!.*visual).*\.(q_proj|v_proj)$", "visual.blocks.0.q_proj", False),
        (r"^(?!.*visual).*\.(q_proj|v_proj)$", "model.layers.0.self_attn.q_proj", True),
        (r"(?:.*?(?:layers|blocks).*?(?:attn|mlp).*?(?:q|up)_proj)", "model.layers.0.mlp.up_proj", True),
        (r"model\.layers\.(\d|1\d|2[0-7])\.mlp\.(gate|up|down)_proj", "model.layers.17.mlp.down_proj", True),
        (r"(q|k)_\1", "q_q", True),
    ],
)
def test_expressions_that_people_write(text: str, name: str, found: bool) -> None:
    assert NamePattern(text).matches(name) is found is (re.fullmatch(text, name) is not None)
