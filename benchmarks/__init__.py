"""Compare speed and memory of this package's models with code that people would use instead."""
