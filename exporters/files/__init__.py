"""Files on disk: atomic writes, and safe reads of files from others."""
