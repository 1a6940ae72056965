"""Durable progress for long jobs. Knows no language model."""
