"""The table of differences from the original code, at the end of pytest's output."""

import itertools

from scripts._shared.results import markdown_table

# a test records its row under this name
ROW = "losses of the original code"
HEADERS = ["case", "setting", "tokens compared", "largest difference", "root mean square"]
HEADERS += ["the original's own", "agrees"]


def pytest_terminal_summary(terminalreporter):
    reports = itertools.chain(*terminalreporter.stats.values())
    rows = [
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == ROW
    ]
    if rows:
        terminalreporter.section("differences of losses from the original code's, in nats")
        terminalreporter.write_line(markdown_table(HEADERS, rows))
