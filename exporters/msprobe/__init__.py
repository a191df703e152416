"""The files of msprobe's monitor: its tables, its curves, its alerts."""
