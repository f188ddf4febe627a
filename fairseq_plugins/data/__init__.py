"""How a data split becomes parallel streams of segments, and how a run walks over them."""
