"""Errors of layers name options where a model translates them."""

import re

import pytest

from fairseq_plugins.fairseq_integration.option_names import errors_name_options

OPTIONS = {"slots": "--memory-slots", "knn": "--memory-knn"}


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ("`slots` is 5: it must be square", "--memory-slots is 5: it must be square"),
        ("`knn` is 9, and `slots` is 4", "--memory-knn is 9, and --memory-slots is 4"),
        ("`knn` is more than `knn`", "--memory-knn is more than --memory-knn"),
        # what is not known stays, as do words without backquotes
        ("`heads` is 0, and `slots` is 4", "`heads` is 0, and --memory-slots is 4"),
        ("`heads` is 0: no slots", "`heads` is 0: no slots"),
        ("slots is 5", "slots is 5"),
        ("``slots`` is 5", "`--memory-slots` is 5"),
        ("`a slots` is 5", "`a slots` is 5"),
        ("", ""),
    ],
)
def test_arguments_in_backquotes_become_options(told, text):
    with (
        pytest.raises(ValueError, match=f"^{re.escape(text)}$"),
        errors_name_options(OPTIONS.get),
    ):
        raise ValueError(told)


def test_the_layers_error_is_not_shown_beside_it():
    caught = pytest.raises(ValueError, match="--memory-slots")
    with caught as raised, errors_name_options(OPTIONS.get):
        raise ValueError("`slots` is 5")
    assert raised.value.__suppress_context__


def test_an_error_without_arguments_is_the_one_that_was_raised():
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    with pytest.raises(UnicodeDecodeError) as raised, errors_name_options(OPTIONS.get):
        raise error
    assert raised.value is error


def test_other_errors_and_results_are_left_alone():
    with pytest.raises(KeyError, match="`slots`"), errors_name_options(OPTIONS.get):
        raise KeyError("`slots`")
    with errors_name_options(OPTIONS.get):
        result = 5
    assert result == 5
