"""All-attention: persistent vectors instead of feed-forward layers, and adaptive attention span.

Sukhbaatar et al. 2019 (arXiv:1907.01470 and arXiv:1905.07799).
"""
