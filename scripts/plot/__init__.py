"""Commands that draw what a training did."""
