"""Turns anomalies into incidents: grouped, ranked, explained in plain words."""
