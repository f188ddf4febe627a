"""Commands that try what the project promises: on a GPU, and under faults."""
