"""Update rules that fairseq can name, and constraints that hold after each update."""
