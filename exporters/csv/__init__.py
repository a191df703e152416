"""CSV tables: writer, reader, and disk quota."""
