"""Speed and memory of this package's models beside code that people would take instead."""
