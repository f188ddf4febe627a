"""Commands that plot the results of trainings."""
