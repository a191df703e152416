"""Compiled code that works on addresses and knows no framework. `host_rows` is missing where there was no compiler."""
