"""Product-key memory (Lample et al. 2019, arXiv:1907.05242)."""
