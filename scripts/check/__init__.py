"""Commands that try what the project promises: on other machines, and under faults."""
