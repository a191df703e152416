"""Takes the place of msprobe's monitor: its configuration, its calls, its files."""
