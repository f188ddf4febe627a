"""Tensor maths of the papers: one file a concept, no configuration objects, no registry."""
