"""The data of the robustness tests, for fairseq's commands on a GPU."""

from tests.end_to_end.conftest import data, made_once, make_pairs  # noqa: F401 (fixtures)
from tests.robustness.conftest import corpora  # noqa: F401 (fixture)
