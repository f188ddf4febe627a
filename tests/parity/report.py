"""The table of differences from the original code, at the end of pytest's output."""

from scripts._shared.results import markdown_table

# a test records its row under this name
ROW = "losses of the original code"
HEADERS = ["case", "setting", "tokens compared", "largest difference", "root mean square"]
HEADERS += ["the original's own", "agrees"]


def pytest_terminal_summary(terminalreporter):
    reports = [report for found in terminalreporter.stats.values() for report in found]
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
