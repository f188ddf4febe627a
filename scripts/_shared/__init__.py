"""Code that the commands of several tasks share."""
