"""Slow implementations of the papers' equations, with which the fast ones are compared."""
