"""The CSV tables: written, read in pieces, and kept inside a quota."""
