"""Tables that commands print."""


def cells(printed):
    """Rows of the tables in a text, headers and rules among them, as lists of cells."""
    lines = (line for line in printed.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
