"""All-attention and adaptive span (Sukhbaatar et al. 2019, arXiv:1907.01470 and 1905.07799)."""
