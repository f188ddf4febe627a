"""Small product-key memories, and a stand-in for the published code."""

from pathlib import Path

import pytest

from scripts._shared import machine as benchmark_machine
from scripts.benchmark import _memory_layers, product_key_memory
from scripts.benchmark._original import MEMORY


@pytest.fixture
def small_memories(monkeypatch):
    """Layers of width 16 with queries of 8, and small products and copies."""
    monkeypatch.setattr(benchmark_machine, "PRODUCT_WIDTH", 64)
    monkeypatch.setattr(benchmark_machine, "COPIED_BYTES", 1 << 16)
    for module in (_memory_layers, product_key_memory):
        monkeypatch.setattr(module, "WIDTH", 16)
        monkeypatch.setattr(module, "QUERY_WIDTH", 8)


@pytest.fixture
def memory_checkout(tmp_path):
    """A folder with a stand-in of the published memory."""
    stand_in = Path(__file__).with_name("stand_in_product_key_memory.py")
    file = tmp_path / "checkout" / MEMORY.file
    file.parent.mkdir(parents=True)
    file.write_text(stand_in.read_text(encoding="utf-8"))
    return tmp_path / "checkout"
