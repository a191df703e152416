"""The map that shows the culprit: its numbers, and its one drawing, as SVG for pages and as PNG for TensorBoard."""
