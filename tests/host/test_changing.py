"""Epilogues whose values change between calls, and between a call and its gradient."""

from hypothesis import given

from tests.changing import check, histories


@given(histories())
def test_values_are_those_of_the_call(history):
    check(history)
