"""Writers and readers of every format on disk: CSV, TensorBoard, dumps, run files. Works on step records."""
