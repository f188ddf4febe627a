"""Look inside a model: one page for the browser."""
