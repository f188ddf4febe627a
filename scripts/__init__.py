"""Commands around the package: `python -m scripts.<task>.<name>`, listed in scripts/README.md."""
