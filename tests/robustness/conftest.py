"""The data and trainings of the end-to-end tests."""

from tests.end_to_end.conftest import corpora, data, made_once, pairs, trained  # noqa: F401
