"""Commands that write pages of docs/."""
