"""First commands: `make quickstart` and `make quickstart-translation`."""
