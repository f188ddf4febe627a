"""Commands that time each paper's models beside others: `make bench`."""
