"""Slow implementations, written from the papers' equations, that the fast ones are held to."""
