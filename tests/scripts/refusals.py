"""What a command returns and prints when it refuses its options or files."""


def refused(result, *named):
    """Return whether a command or its parser failed with a one-line error that has these words."""
    status, _, error = result
    message = error.splitlines()[-1]
    usage = status == 2 and "error: argument" in message
    single = usage or (status == 1 and error == f"{message}\n" and error.startswith("error: "))
    return single and all(str(word) in message for word in named)
