"""Commands that convert models of other code, and compare the result with it."""
