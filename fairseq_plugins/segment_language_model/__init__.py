"""Language models that read parallel streams of text segment by segment, with recurrence."""
