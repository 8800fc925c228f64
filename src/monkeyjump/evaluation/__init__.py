"""Scores of models and adapters on tasks: how answers are read, how sure the numbers are, how they are shown."""
