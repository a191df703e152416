"""The configuration: its keys, its files, its errors."""
