"""What benchmarks print, read again."""


def table(text):
    """Return the cells of the rows of Markdown tables in a text, titles first."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if set("".join(row)) - set("-:")]
