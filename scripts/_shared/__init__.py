"""What the commands of several tasks share."""
