"""The data of the end-to-end tests, for fairseq's commands on a GPU."""

from tests.end_to_end.conftest import corpora, data, made_once, pairs  # noqa: F401 (fixtures)
