"""Product-key memory (Lample et al. 2019, arXiv:1907.05242): large key/value memories as layers.

Begin with :mod:`.memory`, the layer, and :mod:`.search`, the keys.
"""
